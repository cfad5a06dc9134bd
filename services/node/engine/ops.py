"""The operations of a decoder other than products with weights, by torch's operators or by kernels
for GPUs. (On most CPUs, kernel_step.py runs a whole layer at once.)"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.node.engine.attention import Attention, AttentionStep, Span
from services.node.engine.copies import to_device
from services.node.engine.sampling import largest_ids


class Attends(Protocol):
    def run(self, qkv: Tensor, qk_norm: Tensor | None, kv: Tensor, window: int) -> Tensor:
        """Attends, and adds keys and values to the cache. qkv: [rows, (heads + 2 kv heads) x
        head_dim] of a layer. qk_norm: see LayerUnit. kv: the layer's [slots, 2, kv heads,
        head_dim]; keys are cached after rotation. Returns [rows, heads x head_dim]."""


class Ops(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm along each row of x [rows, width]."""

    def look_up(self, table: Tensor, ids: Sequence[int]) -> Tensor:
        """Returns these rows of the table [n, width], in new memory."""

    def largest_ids(self, logits: Tensor) -> Tensor:
        """See sampling.py. logits: [rows, vocab] in float32."""

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) x up, [rows, width], of [rows, 2 x width]. (Packed weights do this by
        themselves: linear.py.)"""

    def attention(
        self, attention: Attention, frequencies: Tensor, spans: Iterable[Span]
    ) -> Attends:
        """One step's attention: planned once, run in every layer of the stage."""


class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def look_up(self, table: Tensor, ids: Sequence[int]) -> Tensor:
        return table[to_device(torch.tensor(ids), table.device)]

    def largest_ids(self, logits: Tensor) -> Tensor:
        return largest_ids(logits)

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """Does not use the fused silu, whose result depends on the place in memory."""
        gate, up = gate_up.chunk(2, dim=1)
        grown = torch.mul(gate, -1, out=torch.empty_like(gate, dtype=torch.float32))
        grown.exp_().add_(1)
        torch.div(gate, grown, out=grown)
        return torch.mul(grown, up, out=torch.empty_like(up))

    def attention(
        self, attention: Attention, frequencies: Tensor, spans: Iterable[Span]
    ) -> Attends:
        return AttentionStep(attention, frequencies, tuple(spans))
