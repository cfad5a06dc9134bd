"""The life of one request, as the gateway that owns it sees it.

    queued --------> submitted ---------> streaming
      ^                  |                    |
      +---- resumed -----+--------------------+       any of the three -> done, failed, cancelled

Rules: a request is in exactly one state; the last three are final. (Done from queued: its text
met a stop string just after its attempt was lost.) Every submission is the next
*attempt*; whatever speaks of an earlier attempt is late and changes nothing. A request is resumed
(back to queued, then the next attempt with prompt + tokens so far) when its attempt is refused,
fails, moves, or its instance is gone; only failures count towards the limit.
"""

import enum
from dataclasses import dataclass, field

from shared.ids import InstanceId, ModelId, RequestId
from shared.messages.serving import LogitRules, Sampling


class State(enum.Enum):
    QUEUED = "queued"
    SUBMITTED = "submitted"
    """Handed to an instance, without a token of this attempt yet."""
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({State.DONE, State.FAILED, State.CANCELLED})
NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: _ENDS | {State.SUBMITTED},
    State.SUBMITTED: _ENDS | {State.QUEUED, State.STREAMING},
    State.STREAMING: _ENDS | {State.QUEUED},
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


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
    rules: LogitRules | None = None
    image: bytes = b""
    """See `Submit.image`."""
    score_from: int = 0
    """See `Submit.score_from`. Grows as the prompt is scored, up to the prompt's length."""
    tokens: list[int] = field(default_factory=list)
    """Tokens generated so far, over all attempts; index i is token i."""
    state: State = State.QUEUED
    attempt: int = 0
    """The number of the current attempt, or of the last one; 0 before the first."""
    failures: int = 0
    refusals: int = 0
    """How many of its attempts were refused since its last token."""
    refusal: str = ""
    """The message of the last refusal."""
    shunned: dict[InstanceId, float] = field(default_factory=dict)
    """Instances that refused it, each with the time until which it keeps away from them."""
    instance: InstanceId | None = None
    """Where the attempt runs; set exactly in SUBMITTED and STREAMING."""
    progress_at: float = 0.0
    """When the attempt was submitted or gave its last token."""
    asked_at: float | None = None
    """When its leader was last asked whether the attempt goes on; None: not since `progress_at`."""
    charge: int = 0
    """Tokens of work that it counts for on its instance."""
    prefill: int = 0
    """How many tokens of `charge` its instance has to prefill before its first token."""
    traces: dict[str, None] = field(default_factory=dict)
    """The traces of the scaling events that made the instances it ran on, in order."""

    @property
    def running(self) -> bool:
        return self.instance is not None

    @property
    def due(self) -> int:
        """The index that is expected next. It is below 0 (see `Scores.index`) while the prompt is
        scored."""
        unscored = len(self.prompt) - self.score_from if self.score_from else 0
        return len(self.tokens) - unscored

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.tokens)

    @property
    def work(self) -> int:
        """Tokens to prefill plus tokens to generate, for an attempt that begins now."""
        return len(self.prompt) + self.max_tokens
