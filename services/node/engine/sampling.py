"""Drawing tokens. A draw depends on (logits, sampling, index) alone: on no state, batch or place.

First a request's rules (services.node.engine.processors) change its logits. Then temperature,
min-p, top-k and top-p apply in this order (vLLM's), each to what the cut before it left. Log
probabilities are the model's own, from before all this.

The one random number of a draw comes from Philox4x64 (a counter-based generator; Salmon et al., SC
2011), with the request's seed as key and the token's index as counter. So a request that is resumed
elsewhere goes on as if it had stayed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from services.node.engine.base import Draw
from services.node.engine.copies import to_device
from services.node.engine.processors import Logits, Processor
from shared import telemetry
from shared.errors import BadInput, LambdaScaleError, ModelError
from shared.messages.serving import Logprobs, Sampling

Weights = npt.NDArray[np.float64]
_64 = 2**64 - 1
Largest = Callable[[torch.Tensor], torch.Tensor]


def largest_ids(logits: torch.Tensor) -> torch.Tensor:
    """The id of each row's largest logit; -1 if that is not finite, as is the case with any NaN."""
    if not _on_device(logits):  # torch's argmax takes ten times as long as numpy's
        values = logits.numpy()
        found = values.argmax(-1)
        finite = np.isfinite(values[np.arange(len(values)), found])
        return torch.from_numpy(np.where(finite, found, -1))
    ids = logits.argmax(-1, keepdim=True)
    return ids.where(logits.gather(-1, ids).isfinite(), -1).squeeze(-1)


def _on_device(logits: torch.Tensor) -> bool:
    return logits.device.type != "cpu"


class Drawn(NamedTuple):
    token: int | None
    """The token. None if there is no token to draw (`error` says why), if the proposed token before
    it was not drawn, or if this scores a known token, whose log probabilities are in `logprobs`, or
    gives a vector."""
    logprobs: Logprobs | None = None
    error: LambdaScaleError | None = None
    vector: bytes = b""
    """The vector of a prompt, for which no token is drawn: see `Token.vector`."""


NOT_FINITE = Drawn(None, error=ModelError("the model's logits are not finite: NaN or infinite"))


def sample(
    logits: torch.Tensor,
    draws: Sequence[Draw],
    processors: Sequence[Processor | None] | None = None,
    proposed: Sequence[int | None] | None = None,
    largest: Largest = largest_ids,
) -> list[Drawn]:
    """Draws one token for each row of `logits` [n, vocab], and tells each row's processor. If a row
    fails, its `Drawn` has the error, and the other rows are drawn. `largest`: as `largest_ids`.

    A row with a `proposed` token comes after the row that should draw this token. If that row draws
    another, nothing is drawn for this one.
    """
    of = processors or [None] * len(draws)
    # Greedy rows need no more than this. Among equal logits the lowest id wins, as below.
    ids = largest(logits)
    done = {row for row, draw in enumerate(draws) if not of[row] and _is_plain(draw.sampling)}
    if there := _on_device(logits):
        done = {row for row in range(len(draws)) if not of[row]}
        _draw_there(logits, draws, done, ids)
    drawn = [Drawn(token) if token >= 0 else NOT_FINITE for token in ids.tolist()]
    if there:
        _score_there(logits, draws, done, drawn)
    if len(done) == len(draws) and all(due is None for due in proposed or ()):
        return drawn
    rest = [row for row, one in enumerate(drawn) if row not in done and one.error is None]
    values = dict(zip(rest, logits[rest].cpu(), strict=True)) if rest else {}
    for row, due in enumerate(proposed or [None] * len(draws)):
        if due is not None and drawn[row - 1].token != due:
            drawn[row] = Drawn(None)
        elif row in values:
            own = values[row].to(torch.float64).numpy()
            drawn[row] = _guarded(own, draws[row], of[row])
    return drawn


def score(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Drawn]:
    """Log probabilities of a known token after each row of `logits` [n, vocab], and of the `top`
    most probable tokens. They are computed where the logits are, since a long prompt has
    thousands."""
    logprobs = logits.log_softmax(-1)
    known = to_device(torch.tensor(tokens), logits.device)
    own: list[float] = logprobs.gather(-1, known.unsqueeze(-1)).squeeze(-1).tolist()
    best = logprobs.topk(min(top, logprobs.shape[-1]))
    found = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        NOT_FINITE
        if math.isnan(logprob)
        else Drawn(None, Logprobs(logprob, tuple(zip(ids, values, strict=True))))
        for logprob, ids, values in found
    ]


def _draw_there(
    logits: torch.Tensor, draws: Sequence[Draw], rows: Iterable[int], ids: torch.Tensor
) -> None:
    """Draws on the device for the rows that draw at random, and writes the results to `ids`. Rows
    with -1 in `ids` stay."""
    random = [row for row in rows if draws[row].sampling.temperature > 0]
    if not random:
        return
    from services.node.engine import device_sampling  # Triton is not installed everywhere

    at = to_device(torch.tensor(random), logits.device)
    samplings = [draws[row].sampling for row in random]
    chances = [uniform(draws[row].sampling.seed, draws[row].index) for row in random]
    found = device_sampling.draw(logits, random, samplings, chances)
    ids[at] = found.where(ids[at] >= 0, -1)


def _score_there(
    logits: torch.Tensor, draws: Sequence[Draw], rows: Iterable[int], drawn: list[Drawn]
) -> None:
    """Adds log probabilities, computed on the device, to the rows that ask for them."""
    asked = {
        row: (token, wanted)
        for row in rows
        if (wanted := draws[row].sampling.logprobs) is not None
        and (token := drawn[row].token) is not None
    }
    if not asked:
        return
    at = to_device(torch.tensor([*asked]), logits.device)
    tokens, counts = zip(*asked.values(), strict=True)
    for row, count, one in zip(
        asked, counts, score(logits[at].double(), tokens, max(counts)), strict=True
    ):
        if one.logprobs is not None:
            best = Logprobs(one.logprobs.drawn, one.logprobs.top[:count])
            drawn[row] = Drawn(drawn[row].token, best)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits: the first that numpy's Philox gives, in a third of
    the time that it takes to make numpy's generator."""
    key, other = seed & _64, 0
    a, b, c, d = index + 1 & _64, index + 1 >> 64, 0, 0
    for _ in range(10):
        first, second = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b = second >> 64 ^ b ^ key, second & _64
        c, d = first >> 64 ^ d ^ other, first & _64
        key, other = key + 0x9E3779B97F4A7C15 & _64, other + 0xBB67AE8584CAA73B & _64
    return (a >> 11) * 2.0**-53


def _is_plain(sampling: Sampling) -> bool:
    return sampling.temperature == 0 and sampling.logprobs is None


def _guarded(logits: Logits, draw: Draw, processor: Processor | None) -> Drawn:
    try:
        return _sampled(logits, draw, processor)
    except LambdaScaleError as error:
        return Drawn(None, error=error)
    except Exception as error:  # a fault must end this row alone
        telemetry.logger("sampling").exception("a draw failed")
        return Drawn(None, error=LambdaScaleError(f"no token could be drawn: {error!r}"))


def _sampled(logits: Logits, draw: Draw, processor: Processor | None) -> Drawn:
    """Draws from `logits` [vocab], which a processor changes in place. BadInput if the rules allow
    no token."""
    wanted = draw.sampling.logprobs
    logprobs = None if wanted is None else _log_softmax(logits)
    if processor is not None:
        processor.apply(logits)
    token = int(logits.argmax())
    if logits[token] == -np.inf:
        raise BadInput("the request's rules leave no token that could follow")
    if draw.sampling.temperature > 0:
        token = _drawn(logits, draw.sampling, draw.index)
    if processor is not None:
        processor.accept(token)
    if logprobs is None or wanted is None:
        return Drawn(token)
    return Drawn(token, Logprobs(float(logprobs[token]), _largest(logprobs, wanted)))


def _log_softmax(logits: Logits) -> Logits:
    shifted: Logits = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _largest(logprobs: Logits, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    ids = _top_k(logprobs, min(count, len(logprobs)))
    ids = ids[np.argsort(-logprobs[ids], kind="stable")]
    return tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))


def _drawn(logits: Logits, sampling: Sampling, index: int) -> int:
    """Draws from the tokens that the cuts leave, by the inverse of the CDF."""
    ids, weights = allowed(logits, sampling)
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    at = np.searchsorted(cumulative, uniform(sampling.seed, index) * total, side="right")
    last = np.searchsorted(cumulative, total)  # the last token with any weight
    return int(ids[min(int(at), int(last))])


def allowed(logits: Logits, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Weights]:
    """(ids, weights) of the tokens that may be drawn. The weights are not normalised."""
    ids: npt.NDArray[np.intp] = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        ids = _top_k(logits, sampling.top_k)
    with np.errstate(over="ignore"):  # at a very low temperature only the best token has weight
        weights = np.exp((logits[ids] - logits[ids].max()) / sampling.temperature)
    if sampling.min_p > 0:
        kept = np.flatnonzero(weights >= sampling.min_p)  # the most probable token weighs 1
        ids, weights = ids[kept], weights[kept]
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _top_k(logits: Weights, k: int) -> npt.NDArray[np.intp]:
    """The ids of the k largest logits, ascending. Among equal logits at the border, the lower ids
    stay."""
    border = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > border)
    equal = np.flatnonzero(logits == border)[: k - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: Weights, top_p: float) -> npt.NDArray[np.intp]:
    """The ids, ascending, of the fewest largest weights that together make up `top_p` of the total;
    at least one."""
    total = weights.sum()
    # Tokens under this bound make up less than 1 - top_p together, so none of them is in the
    # nucleus, and few of a large vocabulary are left to sort.
    candidates = np.flatnonzero(weights >= (1 - top_p) * total / (2 * len(weights)))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), top_p * total)) + 1
    return np.sort(order[:count])
