"""Checks whether a message from another process can be meant: each field in its range, all
consistent.

The types were checked when the message was decoded. What depends on this node (does it hold the
blocks, how large is the vocabulary) is checked where that is known. The checks of a request's own
settings return the reason in words, or an empty string: a peer's `Forward` and a gateway's `Submit`
both carry these settings, and fail in different ways.
"""

from collections.abc import Collection, Iterable
from itertools import pairwise
from math import isfinite, isnan

from services.node.core.microbatches import (
    Admit,
    Admitted,
    Failed,
    Forward,
    Free,
    KvAsk,
    KvDone,
    KvHere,
    Path,
    Pull,
    Sampled,
    StageMessage,
    Yield,
    Yielded,
)
from services.node.core.rows import Context, Draw, Row, Score
from shared.errors import ProtocolViolation
from shared.messages.serving import LogitRules, Logprobs, Sampling

END = 1 << 31
"""Positions, counts and token ids must be below this, so that they fit the engine's integers."""


def check(message: StageMessage) -> None:
    """ProtocolViolation if no working node could have sent this."""
    match message:
        case Admit():
            _check_admit(message)
        case Admitted(stage):
            _check_keys(message.keys)
            if not 0 < stage < END:
                raise _malformed(f"stage {stage} admits")
        case Pull(by, positions):
            if not (by and 0 < positions < END):
                raise _malformed(f"{positions} positions are pulled by {by!r}")
        case Forward():
            _check_forward(message)
        case Sampled():
            _check_sampled(message)
        case Free():
            _check_keys(message.keys)
        case Failed():
            _check_keys(message.sequences)
        case KvAsk():
            _check_keys(message.keys)
            _check_ask(message)
        case KvHere() | Yield() | Yielded():
            _check_keys(message.keys)
            if isinstance(message, Yielded):
                _check_ids(message.generated)
            if isinstance(message, KvHere):
                _check_here(message)
        case KvDone():
            pass
        case _:
            raise _malformed(f"an unexpected {type(message).__name__}")


def wrong_sampling(sampling: Sampling) -> str:
    """Why nothing can be drawn like this; empty if it can."""
    if not (isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"a temperature of {sampling.temperature}"
    if not 0 <= sampling.top_p <= 1:
        return f"a top_p of {sampling.top_p}"
    if not 0 <= sampling.min_p <= 1:
        return f"a min_p of {sampling.min_p}"
    if not 0 <= sampling.top_k < END:
        return f"a top_k of {sampling.top_k}"
    if sampling.logprobs is not None and not 0 <= sampling.logprobs < END:
        return f"log probabilities of {sampling.logprobs} tokens"
    return ""


def wrong_rules(rules: LogitRules) -> str:
    """Why these rules cannot be followed by any model; empty if they can."""
    if not (isfinite(rules.repetition_penalty) and rules.repetition_penalty > 0):
        return f"a repetition penalty of {rules.repetition_penalty}"
    if not (isfinite(rules.frequency_penalty) and isfinite(rules.presence_penalty)):
        return "a frequency or presence penalty that is no finite number"
    if not all(0 <= token < END and isfinite(bias) for token, bias in rules.logit_bias):
        return "a logit bias that is no finite number, or on what is no token id"
    if not all(rules.bad_words) or not all(0 <= t < END for word in rules.bad_words for t in word):
        return "a bad word that is no sequence of token ids"
    if rules.allowed and not 0 <= rules.allowed[0] <= rules.allowed[-1] < END:
        return "allowed tokens that are no token ids"
    if any(one >= other for one, other in pairwise(rules.allowed)):
        return "allowed tokens that are not in order"
    if rules.min_tokens < 0:
        return f"at least {rules.min_tokens} tokens"
    return ""


# --- messages of peers ------------------------------------------------------


def _check_here(message: KvHere) -> None:
    if not 0 <= message.start <= message.stop < END:
        raise _malformed(f"KV of blocks {message.start} to {message.stop}")
    if not 0 <= message.first <= message.end < END:
        raise _malformed(f"KV of positions {message.first} to {message.end}")
    if not 0 <= message.ran < END:
        raise _malformed(f"KV of a sequence that has run {message.ran} positions")


def _check_forward(message: Forward) -> None:
    if message.batch < 0:
        raise _malformed(f"number {message.batch}")
    _check_path(message.path, message.stage)
    if not message.rows:
        raise _malformed("no rows")
    _check_keys([row.sequence for row in message.rows])
    for row in message.rows:
        _check_row(row)


def _check_admit(message: Admit) -> None:
    _check_path(message.path, message.stage)
    _check_keys(message.keys)
    if not 0 < message.tokens <= message.limit < END:
        raise _malformed(f"{message.tokens} tokens of {message.limit}")


def _check_ask(ask: KvAsk) -> None:
    if not 0 <= ask.stage < END or not 0 <= ask.start < ask.stop < END:
        raise _malformed(f"KV of blocks {ask.start} to {ask.stop}, stage {ask.stage}")
    if not 0 <= ask.first < ask.end < END:
        raise _malformed(f"KV of positions {ask.first} to {ask.end}")


def _check_path(path: Path, stage: int) -> None:
    """The path has several stages, and `stage` is one of them, but not the first."""
    stages = path.stages
    if not 0 < stage < len(stages):
        raise _malformed(f"stage {stage} of {len(stages)}")
    if stages[0].start != 0:
        raise _malformed("a path that does not begin at block 0")
    if not all(each.start < each.stop < END for each in stages):
        raise _malformed("a stage without blocks")
    if any(before.stop != after.start for before, after in pairwise(stages)):
        raise _malformed("stages that do not follow on each other")
    if len({each.address for each in stages}) < len(stages):
        raise _malformed("a path that comes to a node twice")


def _check_row(row: Row) -> None:
    if row.position < 0 or row.count < 1 or not row.position + row.count <= row.limit < END:
        raise _malformed(f"positions {row.position} + {row.count} of {row.limit}")
    if row.tokens or row.image:
        raise _malformed("a prompt for a later stage")
    if row.draw:
        if row.proposed >= row.count:
            raise _malformed(f"{row.proposed} of {row.count} positions proposed")
        _check_draw(row.draw, row.position + row.count - row.proposed)
    if row.score:
        _check_score(row.score, row.count)
    if row.pooling and (row.draw or row.score):
        raise _malformed("a row both for a vector and for tokens")


def _check_draw(draw: Draw, known: int) -> None:
    """`known`: tokens before it. At least one of them is the prompt's."""
    if not 0 <= draw.index < known:
        raise _malformed(f"token {draw.index} of a request after {known} tokens")
    if draw.proposed:
        _check_ids(draw.proposed)
    if wrong := wrong_sampling(draw.sampling):
        raise _malformed(wrong)
    if draw.context:
        _check_context(draw.context, draw.index, known)


def _check_context(context: Context, index: int, known: int) -> None:
    if not context.prompt_tokens + index == len(context.tokens) == known:
        raise _malformed(f"rules with {len(context.tokens)} tokens for a draw after {known}")
    _check_ids(context.tokens)
    _check_ids(context.stop_ids)
    if wrong := wrong_rules(context.rules):
        raise _malformed(wrong)


def _check_score(score: Score, count: int) -> None:
    if score.first < 0 or not 0 < len(score.tokens) <= count - score.first:
        raise _malformed(f"{len(score.tokens)} scores from position {score.first} of {count} on")
    if not 0 <= score.top < END:
        raise _malformed(f"scores of {score.top} tokens each")
    _check_ids(score.tokens)


def _check_sampled(message: Sampled) -> None:
    if message.batch < 0:
        raise _malformed(f"number {message.batch}")
    keys = [key for key, _ in message.tokens]
    _check_keys(keys)
    if not message.logprobs.keys() <= set(keys):
        raise _malformed("log probabilities without a row")
    if not message.vectors.keys() <= set(keys):
        raise _malformed("a vector without a row")
    for _, drawn in message.tokens:
        _check_ids(drawn)
    for found in message.logprobs.values():
        _check_logprobs(found)


def _check_logprobs(found: Iterable[Logprobs]) -> None:
    for each in found:
        _check_ids([token for token, _ in each.top])
        if any(map(isnan, (each.drawn, *(logprob for _, logprob in each.top)))):
            raise _malformed("log probabilities that are no numbers")


def _check_keys(keys: Collection[str]) -> None:
    if not all(keys):
        raise _malformed("a sequence without a name")
    if len(set(keys)) < len(keys):
        raise _malformed("a sequence twice")


def _check_ids(tokens: Collection[int]) -> None:
    if min(tokens, default=0) < 0 or max(tokens, default=0) >= END:
        raise _malformed("what is no token id")


def _malformed(what: str) -> ProtocolViolation:
    return ProtocolViolation(f"malformed stage message: {what}")
