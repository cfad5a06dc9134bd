"""Mixtures of experts on a GPU (see experts.py). The device itself sorts which rows go to which
expert, so that nothing is waited for and a decode step can be recorded.

A row's bits may depend on how many other rows are in the step.
"""

import torch
from torch import Tensor

from services.node.checkpoints.config import ExpertsConfig
from services.node.engine import triton_kernels as kernels
from services.node.engine.experts import route
from services.node.engine.triton_ops import TritonOps
from services.node.engine.weights import ExpertMlp

LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of one expert that are multiplied at a time, least and most."""
COLUMNS = 64
DEPTH_BYTES = 128
"""Bytes of a row or a column that are multiplied at a time."""


def add_experts(hidden: Tensor, normed: Tensor, mlp: ExpertMlp, config: ExpertsConfig) -> None:
    """The same as experts.add_experts."""
    weights, chosen = route(normed, mlp, config)
    by_expert, order = chosen.flatten().sort(stable=True)
    gate_up, down = mlp.matrices
    experts = torch.arange(len(down), device=chosen.device)
    ends = torch.searchsorted(by_expert, experts, right=True)
    active = TritonOps().silu_times(_products(normed, gate_up, order, ends, config.per_token))
    made = _products(active, down, order, ends, 1).view(len(hidden), config.per_token, -1)
    hidden += (made * weights[:, :, None]).sum(1)


def _products(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, share: int) -> Tensor:
    """Returns [pairs, columns]; see triton_kernels.multiply_by_expert."""
    experts, columns, width = weight.shape
    out = x.new_empty(len(order), columns)
    mean = len(order) // experts
    rows = min(MOST_ROWS, max(LEAST_ROWS, 1 << mean.bit_length()))
    kernels.multiply_by_expert[experts, -(-columns // COLUMNS)](
        x,
        weight,
        out,
        order,
        ends,
        width,
        columns,
        SHARE=share,
        ROWS=rows,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH_BYTES // x.itemsize,
        num_warps=4,
        num_stages=3,
    )
    return out
