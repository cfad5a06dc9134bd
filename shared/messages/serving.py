"""One request between the gateway that owns it and the node that leads its path.

The gateway owns (prompt, sampling, tokens so far); an *attempt* is one try of one instance at the
rest. Switch, drain and failure all are: cancel the attempt, submit the next one elsewhere.
"""

import msgspec

from shared.ids import GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages.base import Message
from shared.messages.instances import Stage


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How token `i` is drawn: a counter-based generator keyed by (seed, i), no other state."""

    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one are left out."""
    seed: int = 0
    logprobs: int | None = None
    """Log probabilities come back with each token, and of so many of the most probable ones."""


class LogitRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is done to logits before a token is drawn, in the order of the fields.

    It depends on the tokens so far, where `Sampling` does not.
    """

    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that are in the prompt or were generated, and multiplies
    negative ones (CTRL; Keskar et al. 2019, section 4.1)."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token was generated."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens that were generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    min_tokens: int = 0
    """Stop ids are not drawn before so many tokens were."""
    grammar: str = ""
    """What is generated fits it, and may end where the grammar may; as `shared.grammar` writes
    it."""


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Gateway -> leader. Ok once queued; CapacityExceeded, NotFound (no such blocks), BadInput.

    The same attempt over the same path once more asks whether it goes on: Ok if it waits its turn
    or runs, StaleEpoch if it is over here, TransportTimeout if it has been in the same micro-batch,
    with other nodes, since this was asked last.
    """

    request: RequestId
    attempt: int
    gateway: GatewayId
    model_id: ModelId
    instance: InstanceId
    stages: tuple[Stage, ...]
    tokens: tuple[int, ...]
    """The prompt and, on a resumption, the tokens generated so far. A prompt that is an image has
    a 0 for each of its positions."""
    prompt_tokens: int
    """How many of `tokens` are the prompt; the next token has index len(tokens) - prompt_tokens."""
    max_tokens: int
    """Limit on generated tokens, those of earlier attempts included."""
    stop_ids: tuple[int, ...]
    """Generating one of these ends the request; it is sent, as the last token."""
    sampling: Sampling
    rules: LogitRules | None = None
    image: bytes = b""
    """The prompt, for an image classifier, whose one token is the class: rows of pixels, red, green
    and blue a byte each, of the model's size."""
    score_from: int = 0
    """The prompt's tokens from this one on are scored: their log probabilities come before the
    first token, as `sampling.logprobs` says. 0: none are; the first token of all has none."""


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Gateway -> leader, one way: forget the attempt (unknown ones are ignored)."""

    request: RequestId
    attempt: int


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position, as the model gives them: before any
    rule, temperature or cut."""

    drawn: float
    """Of the token that was drawn, or that the prompt has there."""
    top: tuple[tuple[int, float], ...]
    """(token, log probability) of the most probable ones, from the first on."""


class Token(msgspec.Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: int
    index: int
    """Counts the request's generated tokens from 0, over all attempts."""
    token: int
    finish: str = ""
    """`stop` or `length` on the last token."""
    logprobs: Logprobs | None = None
    cached: int = 0
    """On the first token of an attempt: how many of the tokens that it began with were found in
    the prefix cache."""


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of tokens of the prompt that follow each other."""

    request: RequestId
    attempt: int
    index: int
    """Of the first of them, counted as tokens are: the prompt's last token has -1."""
    logprobs: tuple[Logprobs, ...]


class AttemptFailed(msgspec.Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: int
    code: str
    """Code of a `shared.errors` class; the gateway resumes the request elsewhere."""
    message: str


class Tokens(Message, frozen=True, kw_only=True, tag="tokens"):
    """Leader -> one gateway: everything that one engine step produced for its requests."""

    node: NodeId
    tokens: tuple[Token, ...]
    failed: tuple[AttemptFailed, ...] = ()
    scores: tuple[Scores, ...] = ()
    """They come before the tokens."""
