"""What the models of a gateway share: limits, requests, the commands and the story so far."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway.core.commands import Command
from services.gateway.core.requests import NEXT, Request, State
from shared.ids import GatewayId, RequestId
from shared.story import Story


@dataclass(frozen=True, slots=True)
class Rules:
    gateway: GatewayId
    draw: Callable[[], float]
    """Uniform numbers in [0, 1)."""
    max_queue: int
    """Requests of one model that may wait."""
    queue_timeout_s: float
    stall_s: float
    """After this long without a token, the leader is asked whether the attempt is alive. It may
    wait for room there; and a lost last token leaves no gap that would show the loss."""
    max_attempts: int
    """Failures that a request survives."""


@dataclass(slots=True)
class Ledger:
    """What the models of a gateway share."""

    requests: dict[RequestId, Request] = field(default_factory=dict)
    """All that have not ended."""
    out: list[Command] = field(default_factory=list)
    """Commands of the event that is being handled."""
    story: Story = field(default_factory=Story)
    """Of the requests."""
    cause: str = ""
    """The id of the event that is being handled, and when it happened."""
    now: float = 0.0

    def step(self, request: Request, state: State, why: str) -> None:
        """The request's next state, by its table."""
        if state not in NEXT[request.state]:
            before = request.state.value
            raise self.story.illegal(request.id, f"{before} -> {state.value} ({why})")
        request.state = state
        subjects = (request.id, request.model_id, *([request.instance] if request.instance else []))
        text = f"{state.value} (attempt {request.attempt}): {why}"
        self.story.tell(self.now, self.cause, text, *subjects)
