"""Random draws on a GPU, where the logits are: the cuts of `sampling.allowed` and the inverse of
the CDF by one kernel (triton_kernels.py), without a sort and without waiting for the device.
Weights are in float32 here, and in float64 on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.node.engine import triton_kernels as kernels
from services.node.engine.copies import to_device
from shared.messages.serving import Sampling

TILE = 4096
"""Logits that a program looks at together."""
WARPS = 16


def draw(
    logits: Tensor, rows: Sequence[int], samplings: Sequence[Sampling], chances: Sequence[float]
) -> Tensor:
    """Draws one token id from each of these rows of `logits` [n, vocab] in float32. Each row has
    its sampling, with a temperature above 0, and its random number in [0, 1). Returns
    [len(rows)]."""
    vocab = logits.shape[1]
    numbers = [
        (row, each.temperature, each.min_p, each.top_k if each.top_k > 0 else vocab, each.top_p,
         chance)
        for row, each, chance in zip(rows, samplings, chances, strict=True)
    ]  # fmt: skip
    there = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    drawn = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    kernels.draw_token[len(rows),](logits, there, drawn, vocab, TILE=TILE, num_warps=WARPS)
    return drawn
