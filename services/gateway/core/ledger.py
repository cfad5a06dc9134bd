"""What the models of a gateway share: limits, requests, the commands and the story so far."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.gateway.core.commands import Command, Withdraw
from services.gateway.core.others import Others
from services.gateway.core.requests import NEXT, Request, State
from services.gateway.core.routing import OURS, Routing
from shared.ids import GatewayId, NodeId, RequestId
from shared.messages.serving import Cancel
from shared.story import Story


@dataclass(frozen=True, slots=True)
class Rules:
    draw: Callable[[], float]
    """Uniform numbers in [0, 1)."""
    max_queue: int
    """Requests of one model that may wait."""
    queue_timeout_s: float
    stall_s: float
    """After this long without a token, the leader is asked whether the attempt goes on. It may only
    be waiting for room. Or its last token was lost, which no gap would ever show."""
    max_attempts: int
    """How many failures a request survives."""
    routing: Routing = OURS
    check_s: float = 0.0
    """How often each replica is checked (`checks`). 0: never."""


@dataclass(slots=True)
class Ledger:
    """What the models of a gateway share."""

    others: Others
    gateway: GatewayId | None = None
    """This gateway's id now: where nodes send the tokens of what it submits. Set before it submits
    anything."""
    requests: dict[RequestId, Request] = field(default_factory=dict)
    """All requests that have not ended."""
    out: list[Command] = field(default_factory=list)
    """The commands so far of the event that is being handled."""
    story: Story = field(default_factory=Story)
    """The last steps of all requests."""
    cause: str = ""
    """The id of the event that is being handled."""
    now: float = 0.0
    """When that event happened."""

    def withdraw(self, node: NodeId, request: RequestId, attempt: int) -> None:
        cancel = Cancel(request=request, attempt=attempt, cause=self.cause)
        self.out.append(Withdraw(node, cancel, cause=self.cause))

    def step(self, request: Request, state: State, why: str) -> None:
        """Moves the request to its next state. IllegalTransition if its table has no such step."""
        self.story.check_step(request.id, NEXT, request.state, state)
        request.state = state
        self.tell(request, f"{state.value} (attempt {request.attempt}): {why}")

    def tell_about(self, text: str, *subjects: str) -> None:
        self.story.tell(self.now, self.cause, text, *subjects)

    def tell(self, request: Request, text: str) -> None:
        about = (request.id, request.model_id, request.instance, request.call)
        self.story.tell(self.now, self.cause, text, *(subject for subject in about if subject))
