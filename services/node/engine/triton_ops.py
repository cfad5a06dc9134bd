"""The operations of a decoder on a GPU other than products with weights (see ops.py), by fused
kernels.

A decode step reads each weight once and does little else. Done by torch's operators, the reads,
writes and launches of all the rest would be a good part of its time.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from services.node.engine import triton_kernels as kernels
from services.node.engine.attention import Attention, Span
from services.node.engine.ops import TorchOps
from services.node.engine.paged_attention import PagedStep, paged_step, power_of_2

ACTIVATED = 1024
"""Numbers that one program of the activation has."""
NORM_WARPS = 8


class TritonOps(TorchOps):
    """What torch does in one kernel, and well, is left to it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """torch's kernel takes three times as long for the few rows of a decode step."""
        (rows, width), out = x.shape, torch.empty_like(x)
        kernels.rms_norm[rows,](
            x, weight, out, eps, width, TILE=power_of_2(width), num_warps=NORM_WARPS
        )
        return out

    def silu_times(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        kernels.silu_times[rows, -(-width // ACTIVATED)](gate_up, out, width, TILE=ACTIVATED)
        return out

    def attention(
        self, attention: Attention, frequencies: Tensor, spans: Iterable[Span]
    ) -> PagedStep:
        return paged_step(attention, frequencies, spans)
