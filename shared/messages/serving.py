"""The conversation about one request between the gateway that owns it and the node that leads its
path.

The gateway owns the prompt, the sampling and the tokens so far. An *attempt* is one try of one
instance at the rest of the request. Switch, drain and failure are handled alike: the gateway
submits prompt and tokens so far elsewhere, as the next attempt. While the present attempt still
runs, it is cancelled only after the next one was accepted.
"""

import enum
from collections.abc import Iterator

import msgspec

from shared.ids import NO_ADAPTER, GatewayId, InstanceId, ModelId, NodeId, RequestId
from shared.messages.base import Message
from shared.messages.instances import Stage


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How token `i` is drawn: by a counter-based generator keyed by (seed, i), without other
    state."""

    temperature: float = 0.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable token are left out."""
    seed: int = 0
    logprobs: int | None = None
    """How many of the most probable tokens come back with each token, with their log probabilities
    and its own. None: no log probabilities."""


class LogitRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes to logits before a token is drawn, in the order of the fields.

    They depend on the tokens so far; `Sampling` does not.
    """

    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that are in the prompt or
    were generated (CTRL; Keskar et al. 2019, section 4.1)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it was generated."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that were generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, number to add to its logit)."""
    min_tokens: int = 0
    """Stop ids are not drawn before this many tokens were generated."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not generated: the last token of each is not drawn after the
    others of it. The prompt does not count."""
    allowed: tuple[int, ...] = ()
    """The only tokens that are drawn, in order. Empty: all of them are."""
    grammar: str = ""
    """A grammar, in the form of `shared.grammar`, that the generated text follows. It may end where
    the grammar may."""

    @property
    def named(self) -> Iterator[int]:
        """The tokens that they name."""
        yield from (token for token, _ in self.logit_bias)
        yield from (token for word in self.bad_words for token in word)
        yield from self.allowed


class Pooling(enum.Enum):
    """How a prompt becomes one vector: from the states after the model's last norm."""

    CLS = "cls"
    """The state of the first position. Only for encoders: in a decoder it depends on nothing
    else."""
    LAST = "last"
    """The state of the last position."""
    MEAN = "mean"
    """The mean of all positions' states."""


class Submit(Message, frozen=True, kw_only=True, tag="submit"):
    """Gateway -> leader. Ok once queued; else CapacityExceeded, NotFound (a block is missing) or
    BadInput.

    Sending the same attempt again asks whether it goes on. Ok: it waits its turn or runs.
    StaleEpoch: it is over here. TransportTimeout: it is stuck, in the same micro-batch at other
    nodes as when this was last asked.
    """

    request: RequestId
    attempt: int
    takes_over: int = 0
    """The attempt that this one is to take over from. It goes on until it is cancelled, so that
    nothing is lost if the answer to this message is. All other attempts of the request end. 0: all
    of them do."""
    kv_from: tuple[Stage, ...] = ()
    """The path of the attempt that this one takes over from. The node may copy the KV from there
    instead of computing it anew. Ok then comes once the attempt before has ended, or does not end
    in time. SourceLost: a node of that path was lost."""
    gateway: GatewayId
    model_id: ModelId
    instance: InstanceId
    stages: tuple[Stage, ...]
    tokens: tuple[int, ...]
    """The prompt and, on a resumption, the tokens generated so far. A prompt that is an image has a
    0 for each of its positions."""
    prompt_tokens: int
    """How many of `tokens` are the prompt. The next token has the index len(tokens) -
    prompt_tokens."""
    max_tokens: int
    """Limit on generated tokens, including those of earlier attempts."""
    stop_ids: tuple[int, ...]
    """Generating one of these tokens ends the request. It is sent, as the last token."""
    sampling: Sampling
    rules: LogitRules | None = None
    adapter: ModelId = NO_ADAPTER
    """The adapter that every stage computes the request with. Empty: none."""
    image: bytes = b""
    """The prompt of an image classifier, whose single token is the class: rows of pixels, one byte
    each for red, green and blue, of the model's image size."""
    score_from: int = 0
    """Tokens of the prompt are scored from this one on: their log probabilities come before the
    first token, as `sampling.logprobs` says. 0: no token is scored (the very first token never has
    a score)."""
    pooling: Pooling | None = None
    """The request is for the prompt's vector (`Token.vector`), and nothing is drawn. None: it is
    for tokens."""
    alone_until: int = 0
    """The request may be one that kills nodes. Until it has this many tokens, those of the prompt
    included, the nodes of its path begin nothing else. 0: it is a request like others."""
    opening: bool = False
    """The instance is an `opening` one: the node may lack blocks, and runs the request as they
    come."""


class BringAdapter(Message, frozen=True, kw_only=True, tag="bring_adapter"):
    """Leader's node -> node of another stage, before a request with an adapter is submitted there:
    have the adapter in memory. Ok once it is; else CapacityExceeded (no room), NotReady (it is on
    its way) or AdapterUnavailable."""

    adapter: ModelId
    base: ModelId


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Gateway -> leader, one way: forget the attempt. Unknown attempts are ignored."""

    request: RequestId
    attempt: int


class Distrust(Message, frozen=True, kw_only=True, tag="distrust"):
    """Gateway -> node, one way: the node's answers are not those of other nodes. The node checks
    itself. If it finds that so, it is unfit from then on, and ends; the next process checks all
    weights that it takes over."""

    why: str


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position, as the model gives them, before any
    rule, temperature or cut."""

    drawn: float
    """The log probability of the token that was drawn, or of the prompt's token at this
    position."""
    top: tuple[tuple[int, float], ...]
    """(token, log probability) of the most probable tokens, the best first."""


class GatewayGone(Message, frozen=True, kw_only=True, tag="gateway_gone"):
    """Gateway -> all nodes: another gateway is not heard any more. A node that finds that it is not
    connected either ends its attempts: its clients come again elsewhere, and an attempt that nobody
    reads would run beside theirs."""

    gateway: GatewayId


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
    vector: bytes = b""
    """The prompt's vector, if that is what was asked for: float32, little-endian, not normalised.
    The token then means nothing. A node of the release before gives a token and no vector."""
    alone: bool = False
    """Whether the attempt began on a path, and its leader runs it alone by now."""


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of consecutive tokens of the prompt."""

    request: RequestId
    attempt: int
    index: int
    """The index of the first of them, counted as for tokens: the prompt's last token has -1."""
    logprobs: tuple[Logprobs, ...]


class AttemptFailed(msgspec.Struct, frozen=True, array_like=True):
    request: RequestId
    attempt: int
    code: str
    """The code of a `shared.errors` class. The gateway resumes the request elsewhere."""
    message: str


class Tokens(Message, frozen=True, kw_only=True, tag="tokens"):
    """Leader -> one gateway: everything that one engine step produced for its requests."""

    node: NodeId
    tokens: tuple[Token, ...]
    failed: tuple[AttemptFailed, ...] = ()
    scores: tuple[Scores, ...] = ()
    """Scores come before the tokens."""
    kv_used: float = 0.0
    """The share of the leader's KV cache that is in use."""
    kv_free: dict[ModelId, int] = msgspec.field(default_factory=dict)
    """How many positions of KV a new sequence of each model can take on the leader, besides what
    those there will soon take. Below 0: these need more than there is. A model that is not named
    has no KV there, or the leader is of the release before, which does not say."""
