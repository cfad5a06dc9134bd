"""Drawing tokens. A draw depends on (logits, sampling, index) alone: no state, no batch, no place.

The one random number of a draw comes from Philox4x64 (a counter-based generator; Salmon et al.,
SC 2011) with the request's seed as key and the token's index as counter. So a request that is
resumed elsewhere goes on as if it had stayed.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.node.engine.base import Draw
from shared.messages.serving import Sampling

Weights = npt.NDArray[np.float64]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id for each row of `logits` [n, vocab]."""
    # Greedy rows need no more than this; of equal logits the lowest id wins, as below.
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            values = logits[row].to(torch.float64).cpu().numpy()
            tokens[row] = _drawn(values, draw.sampling, draw.index)
    return tokens


def uniform(seed: int, index: int) -> float:
    """In [0, 1), 53 bits."""
    generator = np.random.Philox(key=seed % 2**64, counter=index)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def _drawn(logits: Weights, sampling: Sampling, index: int) -> int:
    """Temperature, then top-k, then top-p over what is left; then the inverse of the CDF."""
    ids, weights = _weights(logits, sampling)
    cumulative = np.cumsum(weights)
    at = np.searchsorted(cumulative, uniform(sampling.seed, index) * cumulative[-1], side="right")
    return int(ids[min(int(at), len(ids) - 1)])


def _weights(logits: Weights, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Weights]:
    """(token ids, their weights, not normalised) of the tokens that may be drawn."""
    ids: npt.NDArray[np.intp] = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        ids = _top_k(logits, sampling.top_k)
    scaled = logits[ids] / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _top_k(logits: Weights, k: int) -> npt.NDArray[np.intp]:
    """The k largest, ascending ids; of equal logits at the border the lower ids stay."""
    border = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > border)
    equal = np.flatnonzero(logits == border)[: k - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: Weights, top_p: float) -> npt.NDArray[np.intp]:
    """The fewest largest weights that make up `top_p` of the total, at least one; ascending."""
    total = weights.sum()
    # Tokens under this bound make up less than 1 - top_p together: none is in the nucleus, and
    # few of a large vocabulary are left to sort.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / (2 * len(weights)))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p * total)) + 1
    return np.sort(order[:count])
