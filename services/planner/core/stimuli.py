"""The stimuli of the planner's core: everything that can change its state.

Broadcasts of nodes, gateways and the registry come in as messages. Everything that the shell does
for the core (a request, a computation in a thread) comes back as an answer with the ticket of its
command.
"""

from collections.abc import Mapping, Sequence

import msgspec

from services.planner.core.instances import Stages
from services.planner.core.placement import Plan
from services.planner.core.tickets import Ticket
from shared.errors import LambdaScaleError
from shared.ids import EventId
from shared.messages import Message
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelAdded,
    ModelRemoved,
    NodeGone,
    NodeJoined,
    NodeStatus,
    PoolState,
)
from shared.messages.scaling import (
    BlockArrived,
    BlocksArrived,
    FirstPartialToken,
    PeerSuspect,
    PullFailed,
    SetInstances,
    Transfer,
)


class Wake(msgspec.Struct, frozen=True):
    """The time has come at which the core asked to be woken."""


class Asked(msgspec.Struct, frozen=True):
    """An operator's request. The command `Answer` with its number is the reply."""

    number: int
    message: SetInstances


class Replied(msgspec.Struct, frozen=True):
    """A service answered a request as it should."""

    ticket: Ticket
    reply: Message


class PoolRead(msgspec.Struct, frozen=True):
    """The registry said who is there."""

    ticket: Ticket
    pool: PoolState


class Pinged(msgspec.Struct, frozen=True):
    ticket: Ticket
    there: bool
    """Whether something answered, if only with an error."""


class Planned(msgspec.Struct, frozen=True):
    ticket: Ticket
    plan: Plan


class Repaired(msgspec.Struct, frozen=True):
    ticket: Ticket
    transfers: tuple[Transfer, ...]


class Appended(msgspec.Struct, frozen=True):
    ticket: Ticket
    plan: Plan
    """Only what was appended."""


class PathsPlanned(msgspec.Struct, frozen=True):
    ticket: Ticket
    planned: Mapping[Stages, float]
    """See `instances.plan`."""


class Failed(msgspec.Struct, frozen=True):
    """What was asked for failed."""

    ticket: Ticket
    error: LambdaScaleError


class Together(msgspec.Struct, frozen=True):
    """Reports of blocks of one event that came at about the same time, in their order. An event of
    a thousand nodes brings thousands of them a second."""

    event: EventId
    reports: Sequence[BlockArrived | BlocksArrived]


Answer = Replied | PoolRead | Pinged | Planned | Repaired | Appended | PathsPlanned | Failed
Heard = (
    NodeStatus
    | NodeJoined
    | NodeGone
    | ModelAdded
    | ModelRemoved
    | GatewayLoad
    | BlockArrived
    | BlocksArrived
    | PullFailed
    | FirstPartialToken
    | PeerSuspect
)
"""The messages that are broadcast."""
Stimulus = Heard | Together | Answer | Asked | Wake


def cause_of(stimulus: Stimulus) -> str:
    """The id of what happened, as commands and stories name it."""
    match stimulus:
        case NodeStatus() | GatewayLoad():  # most of all
            return stimulus.origin
        case Together() | BlockArrived() | BlocksArrived() | PullFailed() | FirstPartialToken():
            return stimulus.event
        case Wake():
            return "wake"
        case Asked():
            return "operator"
        case (
            Replied()
            | PoolRead()
            | Pinged()
            | Planned()
            | Repaired()
            | Appended()
            | PathsPlanned()
            | Failed()
        ):
            return stimulus.ticket.event or type(stimulus).__name__.lower()
        case _:
            return stimulus.origin
