"""The gated MLP's activation, the same for a row whatever the batch (see attention.py)."""

import torch

FUSED_TILE = 1024
"""Numbers that a program of the GPU's kernel has."""


def fused_silu_times(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, width] = silu of the first half of gate_up [rows, 2 x width], times the second: on
    a GPU, in one kernel."""
    from services.node.engine import kernels

    rows, width = out.shape
    kernels.silu_times[rows, -(-width // FUSED_TILE)](gate_up, out, width, TILE=FUSED_TILE)


def silu_times(
    gate: torch.Tensor, up: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """out = silu(gate) x up, in float32 (scratch). Not the fused silu: its result depends on the
    place."""
    torch.mul(gate, -1, out=scratch)
    scratch.exp_().add_(1)
    torch.div(gate, scratch, out=scratch)
    torch.mul(scratch, up, out=out)
