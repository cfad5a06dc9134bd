"""Random draws on a GPU, where the logits are. The cuts of `sampling.allowed` and the inverse of
the CDF, in float64 as on the host, but for many rows at once and without waiting for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.node.engine.copies import to_device
from shared.messages.serving import Sampling

ROWS = 16
"""Rows drawn at a time. Several float64 copies of their logits exist at once, 16 MiB each for a
vocabulary of 128k."""


def draw(logits: Tensor, samplings: Sequence[Sampling], chances: Sequence[float]) -> Tensor:
    """Draws one token id from each row of `logits` [n, vocab]. Each row has its sampling, with a
    temperature above 0, and its random number in [0, 1). Returns [n]."""
    numbers = [
        (each.temperature, each.min_p, each.top_p, chance)
        for each, chance in zip(samplings, chances, strict=True)
    ]
    there = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    pieces = [slice(at, at + ROWS) for at in range(0, len(logits), ROWS)]
    return torch.cat([_draw(logits[some], samplings[some], there[some]) for some in pieces])


def _draw(logits: Tensor, samplings: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """`numbers` has (temperature, min_p, top_p, chance) of each row, in float64."""
    temperature, min_p, top_p, chance = torch.split(numbers, 1, dim=1)
    exact = logits.double()
    exact = exact - exact.amax(-1, keepdim=True)
    weights = (exact / temperature).exp_()
    vocab = logits.shape[-1]
    counts = [each.top_k if 0 < each.top_k < vocab else vocab for each in samplings]
    if min(counts) < vocab:
        weights *= _top_k(logits, counts)
    if any(each.min_p for each in samplings):
        weights *= weights >= min_p
    if any(each.top_p < 1 for each in samplings):
        weights *= _nucleus(weights, top_p)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    at = torch.searchsorted(cumulative, chance * total, right=True)
    last = torch.searchsorted(cumulative, total)  # the last token with any weight
    return torch.minimum(at, last).squeeze(-1)


def _top_k(logits: Tensor, counts: list[int]) -> Tensor:
    """A mask of the `counts[i]` largest logits of each row i. Among equal logits at the border, the
    lower ids are in."""
    most = max(count for count in counts if count < logits.shape[-1])
    wanted = to_device(torch.tensor(counts), logits.device)[:, None]
    largest = logits.topk(most).values
    border = largest.gather(-1, wanted.clamp(max=most) - 1)
    border = border.where(wanted <= most, -torch.inf)
    above, equal = logits > border, logits == border
    room = wanted - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """A mask of the fewest tokens that together have `top_p` of their row's total weight."""
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(-1)
    last = torch.searchsorted(cumulative, top_p * weights.sum(-1, keepdim=True))
    first = torch.arange(weights.shape[-1], device=weights.device) <= last
    return torch.empty_like(first).scatter_(-1, ids, first)
