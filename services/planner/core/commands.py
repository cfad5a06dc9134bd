"""The commands of the planner's core to its shell, to be done in order.

A command with a ticket is a question: the shell feeds exactly one answer with that ticket back,
whatever happens. `cause` is the id of what led to the command (see `stimuli.cause_of`).
"""

from collections.abc import Collection, Mapping

import msgspec

from services.planner.core.instances import Member, Rules
from services.planner.core.links import Links
from services.planner.core.placement import Held, Roles
from services.planner.core.rhythm import History
from services.planner.core.tickets import Ticket
from shared.errors import LambdaScaleError
from shared.ids import NodeId
from shared.messages import Message, pool, scaling
from shared.messages.instances import Instance, InstanceChange, InstanceSet
from shared.messages.pool import ModelRecord
from shared.messages.scaling import EventChanged, EventRecord, Transfer
from shared.parts import Part


class Caused(msgspec.Struct, frozen=True, kw_only=True):
    cause: str


class Question(Caused, frozen=True, kw_only=True):
    ticket: Ticket


# --- requests on the bus ---


class Reserve(Question, frozen=True, kw_only=True):
    message: pool.Reserve


class FindSources(Question, frozen=True, kw_only=True):
    message: pool.SourcesQuery


class ReadPool(Question, frozen=True, kw_only=True):
    message: pool.PoolQuery


class SendPlan(Question, frozen=True, kw_only=True):
    message: scaling.ApplyPlan


class Release(Question, frozen=True, kw_only=True):
    message: scaling.ReleaseModel


class Ping(Question, frozen=True, kw_only=True):
    node: NodeId


class Unreserve(Question, frozen=True, kw_only=True):
    message: pool.Unreserve


Request = Reserve | FindSources | ReadPool | SendPlan | Release | Unreserve


# --- computations, in a thread ---


class MakePlan(Question, frozen=True, kw_only=True):
    """The arguments of `part_plans.plan_parts`."""

    roles: Mapping[Part, Roles]
    held: Held
    model: ModelRecord
    links: Links
    strategy: str
    executing: Collection[NodeId]
    max_stages: int


class Repair(Question, frozen=True, kw_only=True):
    """The arguments of `part_plans.repair_parts`."""

    held: Held
    targets: Mapping[NodeId, Part]
    model: ModelRecord
    links: Links
    reluctant: Collection[NodeId]


class Append(Question, frozen=True, kw_only=True):
    """The arguments of `placement.append_transfers`."""

    held: Held
    running: tuple[Transfer, ...]
    wanted: Held
    model: ModelRecord
    links: Links
    can_send: Collection[NodeId]


class PlanPaths(Question, frozen=True, kw_only=True):
    """The arguments of `instances.plan`."""

    previous: tuple[Instance, ...]
    members: Mapping[NodeId, Member]
    rules: Rules


Compute = MakePlan | Repair | Append | PlanPaths


# --- the rest ---


class AskStatus(Caused, frozen=True, kw_only=True):
    """The node has to say all that it holds."""

    node: NodeId


class Greet(Caused, frozen=True, kw_only=True):
    """The node hears that this planner speaks now. From then on it takes nothing from an earlier
    one that was cut off and does not know that it is over."""

    node: NodeId


class Publish(Caused, frozen=True, kw_only=True):
    message: InstanceSet | InstanceChange | EventChanged


class StoreEvent(Caused, frozen=True, kw_only=True):
    """Keep the record durably. None: forget it."""

    event: str
    record: EventRecord | None


class StoreFixed(Caused, frozen=True, kw_only=True):
    """Keep the operator's number of replicas durably. None: there is none."""

    model: str
    count: int | None


class StoreHistory(Caused, frozen=True, kw_only=True):
    """Keep what is known of the model's rhythm durably. None: forget it."""

    model: str
    history: History | None


class WakeAt(Caused, frozen=True, kw_only=True):
    """Feed `Wake` at this time. Replaces what was asked for before."""

    at: float


class Answer(Caused, frozen=True, kw_only=True):
    """Reply to the `Asked` of this number."""

    number: int
    reply: Message | LambdaScaleError


class Ready(Caused, frozen=True, kw_only=True):
    """Say that the core knows the pool and can answer questions."""


class Log(Caused, frozen=True, kw_only=True):
    level: str
    """`info`, `warning` or `error`."""
    text: str
    fields: dict[str, str | int | float | None]
    error: Exception | None = None
    """Logged with its traceback."""


Attribute = str | int | float | bool


class Span(Caused, frozen=True, kw_only=True):
    """Record a span that is over."""

    name: str
    start_ns: int
    end_ns: int
    parent: str = ""
    """A traceparent."""
    own: str = ""
    """The traceparent by which it is known already. Empty: it gets a new one."""
    attributes: dict[str, Attribute] = {}
    error: str = ""
    children: tuple["Span", ...] = ()


Command = (
    Request
    | Ping
    | Compute
    | AskStatus
    | Greet
    | Publish
    | StoreEvent
    | StoreFixed
    | StoreHistory
    | WakeAt
    | Answer
    | Ready
    | Log
    | Span
)
