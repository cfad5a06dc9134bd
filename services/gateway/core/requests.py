"""The life of one request, as the gateway that owns it sees it.

    queued --> submitted --> streaming       any of the four -> done, failed, cancelled
      ^          |   ^          |   ^
      |          v   |          v   |
      +------- moving (back when refused, or to submitted when taken)

Rules: a request is in exactly one state, and the last three are final. (A queued request can be
done if its text met a stop string just after its attempt was lost.) Every submission is the next
*attempt*. A message about an earlier attempt is late and changes nothing. When its attempt is
refused or fails, or its instance is gone, a request is resumed: it goes back to queued, and its
next attempt begins with the prompt and the tokens so far. Only failures count towards the limit.

A request that moves has a `Move`: it was submitted elsewhere while its attempt goes on. When the
new attempt is accepted, the attempt before is withdrawn. When it is refused, nothing was lost. Both
attempts give the same tokens, and each token counts once, by its index.

A request whose node died is a suspect (`services.gateway.core.suspects`), until it is cleared.
"""

import enum
from dataclasses import dataclass, field

from services.gateway.core.fair_queue import ALONE, Share
from shared.ids import NO_ADAPTER, InstanceId, ModelId, NodeId, RequestId
from shared.messages.serving import LogitRules, Pooling, Sampling

SCORED = 2
"""As how many tokens one counts whose log probabilities are told. A line of them takes a gateway as
long as the token itself, and makes its message some ten times as long."""


class State(enum.Enum):
    QUEUED = "queued"
    SUBMITTED = "submitted"
    """Handed to an instance, without a token of this attempt yet."""
    STREAMING = "streaming"
    MOVING = "moving"
    """Its attempt goes on, and the next attempt was submitted to another instance."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({State.DONE, State.FAILED, State.CANCELLED})
NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: _ENDS | {State.SUBMITTED},
    State.SUBMITTED: _ENDS | {State.QUEUED, State.STREAMING, State.MOVING},
    State.STREAMING: _ENDS | {State.QUEUED, State.MOVING},
    State.MOVING: _ENDS | {State.SUBMITTED, State.STREAMING},
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Move:
    """An attempt that is to take over from the attempt before it."""

    attempt: int
    instance: InstanceId
    charge: int
    prefill: int
    """How many tokens it has to prefill, at least 1."""
    since: float
    """When it was submitted."""


@dataclass(frozen=True, slots=True)
class Left:
    """Attempts that were ended, though no node of theirs had been seen to fail."""

    nodes: frozenset[NodeId]
    """Where they ran."""
    before: int
    """The index of a token that they have surely not come to."""


@dataclass(slots=True, eq=False)
class Request:
    id: RequestId
    model_id: ModelId
    prompt: tuple[int, ...]
    max_tokens: int
    """At least 1."""
    stop_ids: tuple[int, ...]
    sampling: Sampling
    waiting_since: float
    """When it began to wait in the gateway's queue: when it arrived or got its last token, plus the
    time that it has spent on instances since."""
    share: Share = ALONE
    """What it waits as."""
    trace: str = ""
    """The traceparent of the span of its API call; empty: no traces are kept."""
    call: str = ""
    """The id of the API call that it belongs to (`X-Request-ID`)."""
    session: str = ""
    """What the client calls the conversation that it belongs to; empty: nothing."""
    marks: tuple[int, ...] | None = None
    """The marks of its prompt (`services.gateway.core.prefixes`). None: not computed yet."""
    rules: LogitRules | None = None
    adapter: ModelId = NO_ADAPTER
    """See `Submit.adapter`."""
    image: bytes = b""
    """See `Submit.image`."""
    score_from: int = 0
    """See `Submit.score_from`. Grows as the prompt is scored, up to the prompt's length."""
    pooling: Pooling | None = None
    """See `Submit.pooling`."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far, over all attempts; index i is token i."""
    state: State = State.QUEUED
    attempt: int = 0
    """The number of the current attempt, or of the last one; 0 before the first."""
    failures: int = 0
    cleared_at: int | None = None
    """Set while it is a suspect: it is cleared when it is due to get the token of this index."""
    blamed: frozenset[frozenset[NodeId]] = frozenset()
    """The deaths of which it may be the reason. It is a suspect for these. Each is the nodes of
    which one or more have died, as far as is known."""
    unsure: frozenset[NodeId] = frozenset()
    """Nodes that may have died of it before they said that they had it. The gateway asks whether
    they have."""
    surely: bool = False
    """Whether a node is known to have died, or its engine to have failed, since it is a suspect."""
    in_doubt: bool = False
    """Whether its last nodes are being asked if they live. Until then it is not tried again."""
    tried: bool = False
    """Whether it was tried alone there."""
    refusals: int = 0
    """How many of its attempts were refused since one of them gave its first token."""
    refusal: str = ""
    """The message of the last refusal."""
    shunned: dict[InstanceId, float] = field(default_factory=dict)
    """Instances that refused it, each with the time until which it keeps away from them."""
    instance: InstanceId | None = None
    """Where the attempt runs; set exactly in SUBMITTED, STREAMING and MOVING."""
    check: bool = False
    """Whether it checks an instance (`services.gateway.core.checks`). No client waits for it."""
    alone: bool = False
    """Whether the attempt began on a path, and its leader runs it alone by now (`Token.alone`)."""
    move: Move | None = None
    """Set exactly in MOVING."""
    left: Left | None = None
    """The last attempts that were ended because the request moved, or because its instance left the
    set and no node of it was seen to fail. It has not come to `left.before` yet, or had not when it
    left."""
    submissions: int = 0
    """How many attempts were submitted. Each has the next number."""
    submitted_at: float = 0.0
    """When the attempt was submitted."""
    progress_at: float = 0.0
    """When the attempt was submitted or gave its last token."""
    asked_at: float | None = None
    """When its leader was last asked whether the attempt goes on; None: not since `progress_at`."""
    answered_at: float | None = None
    """When its leader last answered that it has the attempt; None: not yet."""
    charge: int = 0
    """Tokens of work that it counts for on its instance."""
    prefill: int = 0
    """How many tokens of `charge` its instance has to prefill before its first token."""
    device_s: float = 0.0
    """See CallUsage."""
    kv_token_s: float = 0.0
    """Tokens that it had KV of, times how long."""
    traces: dict[str, None] = field(default_factory=dict)
    """The traces of the scaling events that made the instances it ran on, in order."""

    @property
    def running(self) -> bool:
        return self.instance is not None

    @property
    def begun(self) -> bool:
        """Whether its instance has said that it has the attempt, or given a token of it."""
        return self.has_token or self.answered_at is not None

    @property
    def suspect(self) -> bool:
        """Whether it may be what killed a node. A suspect runs only alone."""
        return self.cleared_at is not None

    def leave(self, nodes: frozenset[NodeId], before: int) -> None:
        """An attempt over these nodes was ended. See Left."""
        if self.left is not None and self.due < self.left.before:
            nodes, before = nodes | self.left.nodes, max(before, self.left.before)
        self.left = Left(nodes, before)

    @property
    def alone_until(self) -> int:
        """See `Submit.alone_until`, for an attempt that begins now."""
        if self.cleared_at is None:
            return 0
        return len(self.prompt) + len(self.tokens) + self.cleared_at - self.due

    @property
    def has_token(self) -> bool:
        """Whether the current attempt has given a token."""
        return self.prefill == 0

    @property
    def answered(self) -> bool:
        """Whether its leader has answered since it was last asked."""
        asked_at = self.submitted_at if self.asked_at is None else self.asked_at
        return self.answered_at is not None and self.answered_at >= asked_at

    def speaks(self, attempt: int) -> bool:
        """Whether a message about that attempt counts: it is the current attempt, or the move's."""
        if self.move is not None and attempt == self.move.attempt:
            return True
        return self.running and attempt == self.attempt

    @property
    def due(self) -> int:
        """The index that is expected next. It is below 0 (see `Scores.index`) while the prompt is
        scored."""
        unscored = len(self.prompt) - self.score_from if self.score_from else 0
        return len(self.tokens) - unscored

    @property
    def context(self) -> int:
        """How many tokens it has so far, with its prompt."""
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.tokens)

    @property
    def work(self) -> int:
        """Tokens to prefill plus tokens to generate, for an attempt that begins now."""
        return len(self.prompt) + self.max_tokens

    @property
    def price(self) -> int:
        """As how many tokens each of its tokens counts for its tenant."""
        return 1 if self.sampling.logprobs is None else SCORED

    @property
    def cost(self) -> int:
        """What it may cost its tenant, in tokens."""
        of_prompt = self.price if self.score_from else 1
        return len(self.prompt) * of_prompt + self.max_tokens * self.price

    @property
    def unused(self) -> int:
        """What it will not cost its tenant if no further token comes."""
        return self.remaining * self.price
