"""How nodes stand with one model: which of them drain, are released, or should be left alone.

    draining --> releasing --> answered --> (nothing: its memory is free)

A draining node serves the requests that it has, and may be needed again (then it has no state
here). A releasing node was asked to free the model's memory, and is asked again until it has. The
answer alone does not free it: the node's own report must say so, too. If the report does not say so
for a while (a plan that was under way may have reached the node after the release, and begun a new
copy), the node is released again. A node in any state may go.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from services.planner.core.tickets import Moment
from shared.ids import NodeId
from shared.messages.pool import Tier
from shared.story import Story

AVOID_S = 10.0
"""Seconds for which a node is not used after it failed an event or did not answer."""
RELEASE_RETRY_S = 0.5
HOLDS_STILL_S = 5.0
"""Seconds after its answer in which the node's report should show that the memory is free. Reports
come every second."""
RELEASE_WAIT_S = 1.0
"""Seconds that a new event waits for memory that is being released. Then it does without."""


class State(enum.Enum):
    DRAINING = "draining"
    RELEASING = "releasing"
    ANSWERED = "answered"


STEPS: dict[State | None, frozenset[State | None]] = {
    None: frozenset({State.DRAINING, State.RELEASING}),
    State.DRAINING: frozenset({State.RELEASING, None}),
    State.RELEASING: frozenset({State.RELEASING, State.ANSWERED, None}),
    State.ANSWERED: frozenset({State.RELEASING, None}),
}


@dataclass(slots=True)
class Leaving:
    state: State
    since: Moment
    """Since when it drains or, if it never did, is being released."""
    released_at: float = 0.0
    """When its release began."""
    keep: Tier | None = None
    trace: str = ""
    """The trace of the event that loaded a node which drained."""
    drained: bool = False
    """Whether it drained, and has not answered its release yet."""
    number: int = 0
    """The number of the open question; 0: none."""
    retry_at: float = float("inf")


class Standing:
    def __init__(self, story: Story) -> None:
        self._story = story
        self._leaving: dict[NodeId, Leaving] = {}
        self._avoid: dict[NodeId, float] = {}
        """The time until which each node is avoided."""

    # --- what is so ---

    def of(self, node: NodeId) -> Leaving | None:
        return self._leaving.get(node)

    def leaving(self, node: NodeId) -> bool:
        """Whether the node is being released, so that what it holds is about to go."""
        known = self._leaving.get(node)
        return known is not None and known.state is not State.DRAINING

    def draining(self, node: NodeId) -> bool:
        known = self._leaving.get(node)
        return known is not None and known.state is State.DRAINING

    def in_state(self, *states: State) -> list[NodeId]:
        return [node for node, each in self._leaving.items() if each.state in states]

    @property
    def released(self) -> list[NodeId]:
        return self.in_state(State.RELEASING, State.ANSWERED)

    def avoided(self, now: float) -> frozenset[NodeId]:
        return frozenset(node for node, until in self._avoid.items() if now < until)

    def fit(self, node: NodeId, now: float) -> bool:
        """Whether the node may send what it holds."""
        return node not in self._leaving and not now < self._avoid.get(node, float("-inf"))

    def waits(self, now: float) -> bool:
        """Whether memory will be free in a moment."""
        return any(
            now - each.released_at < RELEASE_WAIT_S
            for each in self._leaving.values()
            if each.state is not State.DRAINING
        )

    @property
    def count(self) -> int:
        """The number of nodes that are on their way out."""
        return len(self._leaving)

    @property
    def all_well(self) -> bool:
        """Whether no node is on its way out, or avoided."""
        return not (self._leaving or self._avoid)

    def due(self, now: float) -> list[NodeId]:
        """Nodes that have to be asked again to release the model."""
        return [node for node, each in self._leaving.items() if each.retry_at <= now]

    def next_wake(self, now: float) -> float:
        times = [each.retry_at for each in self._leaving.values()]
        times += [
            each.released_at + RELEASE_WAIT_S
            for each in self._leaving.values()
            if each.state is not State.DRAINING and now < each.released_at + RELEASE_WAIT_S
        ]
        times += [until for until in self._avoid.values() if until > now]
        return min(times, default=float("inf"))

    # --- steps ---

    def drain(self, node: NodeId, now: Moment, trace: str) -> None:
        self._step(node, State.DRAINING)
        self._leaving[node] = Leaving(State.DRAINING, now, trace=trace, drained=True)

    def stay(self, node: NodeId) -> None:
        """Forgets a node's state, because it is needed after all, or gone."""
        if node in self._leaving:
            self._step(node, None)
            del self._leaving[node]

    def release(self, node: NodeId, keep: Tier | None, now: Moment, trace: str) -> None:
        """The node has to free the model's memory. `keep`: the tier to keep it in, if any."""
        self._step(node, State.RELEASING)
        known = self._leaving.setdefault(node, Leaving(State.RELEASING, now, trace=trace))
        known.state, known.keep, known.released_at = State.RELEASING, keep, now.at

    def asked(self, node: NodeId, number: int) -> None:
        known = self._leaving[node]
        known.number, known.retry_at = number, float("inf")

    def refused(self, node: NodeId, now: float) -> None:
        known = self._leaving[node]
        known.number, known.retry_at = 0, now + RELEASE_RETRY_S

    def answered(self, node: NodeId, now: float) -> None:
        self._step(node, State.ANSWERED)
        known = self._leaving[node]
        known.state, known.number, known.retry_at = State.ANSWERED, 0, now + HOLDS_STILL_S
        known.drained = False

    def avoid(self, node: NodeId, now: float) -> None:
        self._avoid = {each: until for each, until in self._avoid.items() if now < until}
        self._avoid[node] = now + AVOID_S

    def forget(self, node: NodeId) -> None:
        """Forgets a node that is gone: the next process of its name is another node."""
        self.stay(node)
        self._avoid.pop(node, None)

    def _step(self, node: NodeId, state: State | None) -> None:
        known = self._leaving.get(node)
        self._story.check_step(node, STEPS, known.state if known is not None else None, state)

    def validate(self, members: Iterable[NodeId], draining: Iterable[NodeId]) -> None:
        """`members`: the model's members. `draining`: members that take no new requests."""
        assert set(self.in_state(State.DRAINING)) == set(draining)
        assert not set(self.released) & set(members)
        for each in self._leaving.values():
            waits, again = bool(each.number), each.retry_at < float("inf")
            match each.state:
                case State.DRAINING:
                    assert not waits
                    assert not again
                case State.RELEASING:
                    assert waits != again
                case State.ANSWERED:
                    assert again
                    assert not waits
