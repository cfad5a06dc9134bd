"""The registry's orders of copies in one tier, and what has become of each.

An order is to make one model's copy on one node, in that node's generation. Its states:

    state    to        when
    (none)   asked     the registry asks the node
             running   the node reports such a copy already: an earlier registry asked for it
    asked    running   the node reports the copy
             refused   the node answers with an error or reports one, or says nothing for ASKED_S
             (none)    the copy is made
    running  doubted   there is no progress for STALL_S
             refused   the node reports an error
             (none)    the node reports the copy no more: it is made or given up
    doubted  running   REFUSED_S later, if there was progress in the meantime
             refused   the node reports the copy no more, or an error
             (none)    the copy is made
    refused  doubted   the node reports the copy all the same
             (none)    REFUSED_S later: the node may be asked again; or the copy is made
    any      (none)    the node or the model is gone

What nodes report is the truth: a copy is under way if its node says so, and made once it is in the
node's holdings. So a registry that starts anew, late answers and repeated orders do no harm. A
doubted copy is one that its node makes, but that nobody counts on: another node is asked.

Any other step is a bug: IllegalTransition, with the node's story.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shared.ids import Generation, ModelId, NodeId
from shared.messages.pool import CopyProgress
from shared.story import Story

ASKED_S = 15.0
STALL_S = 60.0
REFUSED_S = 60.0
"""Seconds for which a node that refused, or makes no progress, is passed over."""
REPORTED = "node_status"
"""The cause of what follows from nodes' reports alone."""


class State(enum.Enum):
    ASKED = "asked"
    RUNNING = "running"
    DOUBTED = "doubted"
    REFUSED = "refused"


STEPS: Mapping[State | None, frozenset[State | None]] = {
    None: frozenset({State.ASKED, State.RUNNING}),
    State.ASKED: frozenset({State.RUNNING, State.REFUSED, None}),
    State.RUNNING: frozenset({State.DOUBTED, State.REFUSED, None}),
    State.DOUBTED: frozenset({State.RUNNING, State.REFUSED, None}),
    State.REFUSED: frozenset({State.DOUBTED, None}),
}
UNDER_WAY = (State.ASKED, State.RUNNING, State.DOUBTED)
MADE = (State.RUNNING, State.DOUBTED)
"""The states in which the node reports that it makes the copy."""
PASSED_OVER = (State.DOUBTED, State.REFUSED)


class Order(NamedTuple):
    model_id: ModelId
    node: NodeId
    generation: Generation


@dataclass(slots=True)
class _Known:
    state: State
    since: float
    """When the node was asked or, in the states of MADE, last made progress."""
    done: int = 0
    """Bytes that the node has reported."""
    until: float = 0.0
    """Until when the node is passed over, in the states of PASSED_OVER."""
    why: str = ""
    """Why it is passed over."""
    cause: str = REPORTED
    """What made the copy needed. Of a copy that was not asked for, only the report is known."""
    hurried: bool = False
    """Whether the order was given once more, at a higher rate."""


class Orders:
    def __init__(self, tier: str, story: Story) -> None:
        """`tier`: its name in stories."""
        self._tier = tier
        self._story = story
        self._orders: dict[Order, _Known] = {}

    # --- what is so ---

    @property
    def known(self) -> list[Order]:
        return list(self._orders)

    def state(self, order: Order) -> State | None:
        known = self._orders.get(order)
        return known.state if known is not None else None

    @property
    def under_way(self) -> set[Order]:
        return set(self._in_state(*UNDER_WAY))

    @property
    def made(self) -> list[Order]:
        """Those that nodes report to be making, in order."""
        return sorted(self._in_state(*MADE))

    def expected(self, model: ModelId) -> list[NodeId]:
        """The nodes from which a copy of the model is expected."""
        found = self._in_state(State.ASKED, State.RUNNING)
        return sorted(order.node for order in found if order.model_id == model)

    def passed_over(self, model: ModelId) -> dict[NodeId, str]:
        """The nodes that are not asked for a copy of the model now, and why."""
        found = self._in_state(*PASSED_OVER)
        return {each.node: self._orders[each].why for each in found if each.model_id == model}

    def _in_state(self, *states: State) -> list[Order]:
        return [order for order, known in self._orders.items() if known.state in states]

    # --- what happens ---

    def ask(self, order: Order, cause: str, now: float) -> None:
        """`cause`: the id of what made the copy needed."""
        self._to(order, State.ASKED, now)
        self._orders[order].cause = cause

    def refuse(self, order: Order, why: str, now: float) -> None:
        """The node answered with an error, or not at all. Late answers to older orders change
        nothing."""
        if self.state(order) is State.ASKED:
            self._to(order, State.REFUSED, now, why)

    def hurry(self, order: Order) -> bool:
        """Marks a copy that its node makes as hurried. Returns whether it was not."""
        known = self._orders[order]
        was, known.hurried = known.hurried, True
        return not was

    def report(
        self, order: Order, progress: CopyProgress | None, now: float, *, gone: bool, made: bool
    ) -> None:
        """Takes in what the node reports about the copy; None: nothing. `gone`: the node or the
        model is. `made`: the node has the copy."""
        state, running = self.state(order), progress is not None and progress.running
        if state is State.REFUSED and (gone or made or now >= self._orders[order].until):
            self._to(order, None, now)
            state = None
        if progress is not None and running:
            self._on_running(order, progress.done, now)
        elif state is None or state is State.REFUSED:
            pass
        elif gone or made:
            self._to(order, None, now)
        elif progress is not None and progress.error:
            self._to(order, State.REFUSED, now, progress.error)
        elif state is State.RUNNING:
            self._to(order, None, now)
        elif state is State.DOUBTED:
            self._to(order, State.REFUSED, now)
        elif now - self._orders[order].since >= ASKED_S:
            self._to(order, State.REFUSED, now, "it does not answer")

    def _on_running(self, order: Order, done: int, now: float) -> None:
        match self.state(order):
            case None | State.ASKED:
                self._to(order, State.RUNNING, now)
                self._orders[order].done = done
            case State.REFUSED:
                self._to(order, State.DOUBTED, now)
                self._orders[order].done = done
        known = self._orders[order]
        if known.done != done:
            known.done, known.since = done, now
        stalls = now - known.since >= STALL_S
        if known.state is State.RUNNING and stalls:
            self._to(order, State.DOUBTED, now, f"no progress for {STALL_S:.0f} s")
        elif known.state is State.DOUBTED and now >= known.until:
            if stalls:
                known.until = now + REFUSED_S
            else:
                self._to(order, State.RUNNING, now)

    def _to(self, order: Order, state: State | None, now: float, why: str = "") -> None:
        """`why`: why the node is passed over from now on, if that is new."""
        self._story.check_step(order.node, STEPS, self.state(order), state)
        if state is not State.ASKED:  # the pool tells of what it asks for
            change = f"copy on {self._tier} {state.value if state else 'is no order any more'}"
            text = f"{change}: {why}" if why else change
            known = self._orders.get(order)
            cause = known.cause if known is not None else REPORTED
            self._story.tell(now, cause, text, order.node, order.model_id)
        if state is None:
            del self._orders[order]
            return
        known = self._orders.setdefault(order, _Known(state, now))
        if known.state not in MADE and state in MADE:
            known.since = now
        known.state, known.hurried = state, known.hurried and state in MADE
        if why:
            known.until, known.why = now + REFUSED_S, why

    def validate(self) -> None:
        """Raises AssertionError if parts of the state contradict each other."""
        for known in self._orders.values():
            assert known.why or known.state not in PASSED_OVER, "a node is passed over for nothing"
            assert known.state in MADE or not known.hurried, "what nobody makes is hurried"
