"""What the state machines of one planner share while they handle a stimulus."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from services.planner.core.archive import Archive, fitting
from services.planner.core.chronicle import Chronicle
from services.planner.core.cluster import Cluster
from services.planner.core.commands import Attribute, Command, Log, Publish, Span
from services.planner.core.disks import Read
from services.planner.core.scaling import Decide, decide
from services.planner.core.serving.loading import ServingStrategy
from services.planner.core.tickets import Moment, Ticket
from shared.ids import EventId, ModelId
from shared.messages.instances import InstanceChange, InstanceSet
from shared.messages.scaling import EventChanged, EventRecord
from shared.story import Story

ASK_S = 5.0
"""Seconds after which an answer of the registry, or to a ping, counts as lost."""
RELEASE_S = 12.0
"""Seconds after which an answer to a release counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The planner's settings. Fields of `PlannerConfig` mean the same there."""

    epoch: int
    """Counts the planners of this cluster: each has a higher number than those before it."""
    new_id: Callable[[str], str]
    """Makes an id with this prefix, never the same twice."""
    new_trace: Callable[[], str]
    """Makes a traceparent for a new trace; empty if traces are not kept."""
    serving: ServingStrategy
    strategy: str
    tick_s: float
    queue_per_instance: float
    prefill_wait_s: float
    fill: float
    idle_s: float
    scale_up_hold_s: float
    horizon_s: float
    stray_s: float
    anticipate: bool
    max_stages: int
    link_bytes_per_s: int
    disk_bytes_per_s: int
    step_overhead_s: float
    decide: Decide = decide
    """How many replicas a model needs."""


@dataclass(slots=True)
class _Open:
    ticket: Ticket
    due: float
    """When its answer counts as lost."""


class Desk:
    """Time, cause and commands of what is being handled, and the open questions."""

    def __init__(self, settings: Settings, archive: Archive) -> None:
        self.settings = settings
        self.archive = archive
        self.cluster = Cluster(settings.disk_bytes_per_s)
        self.story = Story()
        self.chronicle = Chronicle()
        self.now = Moment(0.0, 0)
        self.cause = ""
        self.out: list[Command] = []
        self.reads: Callable[[ModelId], Sequence[Read]] = lambda _: ()
        """What running events read from disks, but for those of the model that asks."""
        self.room_freed = False
        """Whether nodes that could not be had may be had now."""
        self.disks_at = inf
        """When models that wait for disks are to ask again, if nothing happens before."""
        self._numbers = itertools.count(1)
        self._revisions = itertools.count(1)
        self._open: dict[int, _Open] = {}

    @property
    def at(self) -> float:
        return self.now.at

    def next_revision(self) -> int:
        """The next revision of instance sets. All models share one sequence, so that a model that
        comes back does not begin with an older number."""
        return next(self._revisions)

    # --- questions ---

    def ask(
        self,
        *,
        within: float,
        model: ModelId | None = None,
        event: EventId | None = None,
        revision: int = 0,
    ) -> Ticket:
        """A ticket for a question whose answer counts as lost after `within` seconds."""
        ticket = Ticket(self.settings.epoch, next(self._numbers), model, event, revision)
        self._open[ticket.number] = _Open(ticket, self.at + within)
        return ticket

    def settle(self, ticket: Ticket) -> bool:
        """Whether an answer with this ticket is the first to an open question."""
        known = self._open.get(ticket.number)
        if known is None or known.ticket != ticket:
            return False
        del self._open[ticket.number]
        return True

    def is_open(self, number: int) -> bool:
        return number in self._open

    def lost(self) -> list[Ticket]:
        """Tickets of questions whose answers count as lost by now."""
        return [each.ticket for each in self._open.values() if each.due <= self.at]

    def validate(self) -> None:
        """Raises AssertionError if an open question is not one of this planner's, under its own
        number."""
        for number, each in self._open.items():
            assert each.ticket.number == number
            assert each.ticket.epoch == self.settings.epoch

    # --- commands ---

    def do(self, *commands: Command) -> None:
        self.out += commands

    def announce(self, record: EventRecord) -> None:
        """Tells observers and the durable store of an event's new state or revision."""
        (sent,) = fitting([record])
        self.out += self.archive.put(record, self.cause, sent)
        message = EventChanged(record=sent, trace=record.trace, cause=record.id)
        self.do(Publish(message=message, cause=self.cause))

    def keep(self, record: EventRecord) -> None:
        self.out += self.archive.put(record, self.cause)

    def publish(self, instances: InstanceSet | InstanceChange) -> None:
        self.chronicle.on_instances(instances, self.now.wall_ns)
        self.do(Publish(message=instances, cause=self.cause))

    # --- for people ---

    def tell(self, text: str, *subjects: str) -> None:
        self.story.tell(self.at, self.cause, text, *subjects)

    def log(self, level: str, text: str, **fields: str | int | float | None) -> None:
        self.do(Log(level=level, text=text, fields=fields, cause=self.cause))

    def complain(self, text: str, error: Exception, **fields: str | int | float | None) -> None:
        """Logs something that should not happen."""
        self.do(Log(level="error", text=text, fields=fields, error=error, cause=self.cause))

    def span(
        self,
        name: str,
        parent: str,
        *,
        since_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        children: tuple[Span, ...] = (),
        error: str = "",
    ) -> None:
        """Records a span that ends now."""
        self.do(
            Span(
                name=name,
                start_ns=self.now.wall_ns if since_ns is None else since_ns,
                end_ns=self.now.wall_ns,
                parent=parent,
                attributes=dict(attributes or {}),
                children=children,
                error=error,
                cause=self.cause,
            )
        )
