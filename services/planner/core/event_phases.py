r"""The phases of a scaling event, what it tells its model, and a case of trouble.

    reserving -> planning -> forming -> sending -> loading <-> judging
                                          ^   \      ^ |        /
                                          |    v     | v       /
                                          +---- repairing <---+
reserving: the registry sets targets aside and names sources. planning: a thread chooses how blocks
spread. forming: a group takes its time to form, before anything moves. sending: targets are given
their parts of a revision of the plan. loading: blocks arrive. judging: nodes that are in doubt are
pinged. repairing: a thread plans again. An event that grows
(`growing`) goes from loading to sending, with parts for the newcomers only. An event that another
planner began goes straight to loading: the nodes follow its plan. Every phase may end in
`over`: complete, failed or cancelled. What others see of an event is its record, with a table of
its own (`events.TRANSITIONS`).
"""

import enum
from dataclasses import dataclass, field

from shared.ids import NodeId
from shared.messages.pool import NodeGone, NodeInfo
from shared.messages.scaling import PullFailed, Transfer
from shared.parts import Part


class Phase(enum.Enum):
    RESERVING = "reserving"
    PLANNING = "planning"
    FORMING = "forming"
    SENDING = "sending"
    LOADING = "loading"
    JUDGING = "judging"
    REPAIRING = "repairing"
    OVER = "over"


_P = Phase
STEPS: dict[Phase, frozenset[Phase]] = {
    _P.RESERVING: frozenset({_P.PLANNING, _P.LOADING, _P.OVER}),
    _P.PLANNING: frozenset({_P.FORMING, _P.OVER}),
    _P.FORMING: frozenset({_P.SENDING, _P.OVER}),
    _P.SENDING: frozenset({_P.LOADING, _P.REPAIRING, _P.OVER}),
    _P.LOADING: frozenset({_P.JUDGING, _P.REPAIRING, _P.SENDING, _P.OVER}),
    _P.JUDGING: frozenset({_P.LOADING, _P.REPAIRING, _P.OVER}),
    _P.REPAIRING: frozenset({_P.SENDING, _P.LOADING, _P.OVER}),
    _P.OVER: frozenset(),
}


# --- what the event tells its model ---


@dataclass(frozen=True, slots=True)
class Joined:
    """The node is a target now."""

    info: NodeInfo
    part: Part | None = None
    """What it is to hold, as one device of a group. None: all."""
    wakes: bool = False
    """Whether all of that is in its own memory."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The node is no longer a target, by its own fault."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Freed:
    """The event failed, or goes on without this target: what it holds may be freed."""

    node: NodeId


Effect = Joined | Dropped | Freed


@dataclass(frozen=True, slots=True)
class Taken:
    """A node has to make room for another model at once."""

    node: NodeId
    why: str


Trouble = PullFailed | NodeGone | Taken


@dataclass(slots=True)
class Case:
    """Something that went wrong, while it is looked into."""

    why: str
    failures: tuple[PullFailed, ...] = ()
    gone: frozenset[NodeId] = frozenset()
    taken: frozenset[NodeId] = frozenset()
    """Those of `gone` that only make room for another model."""
    slow: frozenset[NodeId] = frozenset()
    """Nodes to be relieved if that is possible. Nothing else is wrong with them."""
    silent: set[NodeId] = field(default_factory=set)
    """Nodes that did not answer a ping."""
    amends: bool = False
    """Whether only what failed pulls were to bring is planned again."""
    receiving: tuple[NodeId, ...] = ()
    """The targets that are given new parts."""
    kept: tuple[Transfer, ...] = ()
    """If it amends: the transfers that go on."""
    begun_ns: int = 0
    """When it was taken up."""
    since_ns: int = 0
    """When its plan was asked for."""
