"""The gated MLP's activation, the same for a row whatever the batch (see attention.py)."""

import torch


def silu_times(
    gate: torch.Tensor, up: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """out = silu(gate) x up, in float32 (scratch). Not the fused silu: its result depends on the
    place."""
    torch.mul(gate, -1, out=scratch)
    scratch.exp_().add_(1)
    torch.div(gate, scratch, out=scratch)
    torch.mul(scratch, up, out=out)
