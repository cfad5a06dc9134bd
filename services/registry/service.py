"""The registry's shell: the bus on one side, the pool on the other.

Handlers change the pool without awaiting in between, so that each sees it whole. What follows from
a change (announcements, writes) is queued in order and done by tasks that outlast a bus outage.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from services.registry.core.access import Access
from services.registry.core.catalog import WISHES
from services.registry.core.copies_view import copies_view
from services.registry.core.kept import CopyOrdered, Keeping, ModelSkipped
from services.registry.core.pool import (
    CopyDropped,
    DutySaid,
    Effect,
    Pool,
    ReservationEnded,
    ReservationMade,
    StatusWanted,
)
from services.registry.lease_watch import LeaseWatch
from services.registry.store import Store
from shared import clock, subjects
from shared.bus.base import Bus, On
from shared.capabilities import LIFETIME_S, load_signer
from shared.config import RegistryConfig
from shared.containment import is_containable
from shared.errors import BusError, LambdaScaleError, MessageTooLarge, Superseded
from shared.ids import NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.access import AccessPage, AccessQuery, ChangeAccess
from shared.messages.copies import CopiesQuery, DropCopy, KeepCopy, Leave, MayLeave, PoolCopies
from shared.messages.pool import (
    ModelAdd,
    ModelAdded,
    ModelRecord,
    ModelRemove,
    ModelRemoved,
    Models,
    ModelSet,
    ModelsQuery,
    NodeGone,
    NodeJoined,
    Nodes,
    NodesQuery,
    NodeStatus,
    PoolPage,
    PoolQuery,
    ReportStatus,
    Reserve,
    Reserved,
    SetDuty,
    Sources,
    SourcesQuery,
    Unreserve,
)
from shared.messages.story import StoryQuery, Told
from shared.service import Service

if TYPE_CHECKING:
    from shared.metrics import Metrics

PULSE_S = 0.5
"""Seconds between messages of the registry to itself, which tell it whether the bus is there."""
TICK_S = 0.25
"""Seconds between looks at leases in doubt."""
STORED_WAIT_S = 0.25
"""Seconds that an answer about reservations waits until it is durable. Then it goes out as it
is."""
RETRY_S = 0.5
"""Seconds between attempts at the bus."""
ORDER_TIMEOUT_S = 10.0
"""Seconds in which a node answers whether it makes a copy."""


class RegistryService(Service):
    """Keeps models, nodes and their leases, which block lies where, and reservations. One process
    is active; others stand by.

    How durable an answer is: a model that was added or removed is stored before Ok. Reservations
    are in force with the answer, and are stored just before it (which takes about a millisecond).
    While the durable store takes no writes, they are stored as soon as it does; a registry that is
    killed in such an outage forgets the reservations made during it. Where copies in the arenas
    keep the room, reservations are stored just after the answer. If the registry is killed in
    between, another model's event may get a node that still wakes its copy: the room is there for
    both. After a start, requests about nodes wait until the nodes have said what they hold. `bus`
    is opened and closed by the caller.
    """

    role: ClassVar[str] = "registry"
    pool_type: ClassVar[type[Pool]] = Pool
    """Simulations use a pool that is validated after every change."""

    def __init__(self, bus: Bus, config: RegistryConfig) -> None:
        super().__init__("registry")
        self.pool = self.pool_type(
            durable=_keeping(config, config.durable_copies, config.restore_after_s),
            host=_keeping(config, config.host_copies, 0.0),
        )
        self.access = Access()
        self._given_bus = bus
        self._config = config
        self._outbox: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self._leases = LeaseWatch(self, self.pool, self._follow)
        self._reconciled = asyncio.Event()
        self._catalog_lock = asyncio.Lock()
        self._access_lock = asyncio.Lock()

    def metrics(self) -> "Metrics":
        from services.registry.metrics import RegistryMetrics

        metrics = super().metrics()
        RegistryMetrics(metrics, lambda: self.pool if self.ready else None)
        return metrics

    async def open(self) -> None:
        self._signer = load_signer(self.role, self._config.signing_key_file)
        bus = self._bus = await self.become_active(self._given_bus)
        self._store = Store(bus, self.log)
        await self._restore()
        leases = await bus.kv(subjects.KV_LEASES)
        self.own(await bus.subscribe(subjects.POOL_STATUS, On(NodeStatus, self._on_status)))
        self.spawn(self._store.write(), name="store")
        self.spawn(self._announce(), name="announce")
        self.spawn(self._leases.run(leases), name="leases")
        self.own(await bus.subscribe(subjects.REGISTRY_PULSE, On(Ping, self._on_pulse)))
        self.spawn(self._pulse(), name="pulse")
        self.spawn(self._tick(), name="tick")
        self.spawn(self._reconcile(), name="reconcile")
        self.own(await bus.serve(subjects.REGISTRY_MODEL_ADD, ModelAdd, self._add_model))
        self.own(await bus.serve(subjects.REGISTRY_MODEL_REMOVE, ModelRemove, self._remove_model))
        self.own(await bus.serve(subjects.REGISTRY_MODEL_SET, ModelSet, self._set_model))
        self.own(await bus.serve(subjects.REGISTRY_ACCESS, AccessQuery, self._access))
        self.own(
            await bus.serve(subjects.REGISTRY_ACCESS_CHANGE, ChangeAccess, self._change_access)
        )
        self.own(await bus.serve(subjects.REGISTRY_MODELS, ModelsQuery, self._models))
        self.own(await bus.serve(subjects.REGISTRY_SOURCES, SourcesQuery, self._sources))
        self.own(await bus.serve(subjects.REGISTRY_RESERVE, Reserve, self._reserve))
        self.own(await bus.serve(subjects.REGISTRY_UNRESERVE, Unreserve, self._unreserve))
        self.own(await bus.serve(subjects.REGISTRY_POOL, PoolQuery, self._view))
        self.own(await bus.serve(subjects.REGISTRY_NODES, NodesQuery, self._nodes))
        self.own(await bus.serve(subjects.REGISTRY_COPIES, CopiesQuery, self._copies))
        self.own(await bus.serve(subjects.REGISTRY_DUTY, SetDuty, self._set_duty))
        self.own(await bus.serve(subjects.REGISTRY_LEAVE, Leave, self._leave))
        self.own(await bus.serve(subjects.REGISTRY_STORY, StoryQuery, self._story))

    async def drain(self) -> None:
        await self._outbox.join()
        await self._store.settled(self.drain_s)

    async def _restore(self) -> None:
        saved = await self._store.load()
        for record, reason in self.pool.catalog.restore(saved.models):
            self.log.warning("stored model ignored", model=record.name, reason=reason)
        self.pool.duties.restore(saved.duties)
        self.access.restore(saved.access)
        for info in saved.nodes:
            with self.contain("restoring a node", node=info.node):
                self.pool.restore([info], [], clock.now())
        for held in saved.reservations:
            with self.contain("restoring a reservation", node=held.node, event_id=held.event):
                self.pool.restore([], [held], clock.now())
        self.log.info(
            "state restored",
            models=len(saved.models),
            nodes=len(saved.nodes),
            reservations=len(saved.reservations),
        )

    # --- requests ---

    async def _add_model(self, request: ModelAdd) -> Ok:
        async with self._catalog_lock:
            record = self.pool.catalog.admit(request.record)
            if record is None:
                return Ok()
            before = self.pool.catalog.get(record.model_id)
            await self._store.model(record.model_id, record, before)
            self.pool.model_put(record, request.origin)
        self.log.info("model added", model=record.name, model_id=record.model_id)
        self._publish(record, request)
        return Ok()

    async def _set_model(self, request: ModelSet) -> Models:
        async with self._catalog_lock:
            before = self.pool.catalog.named(request.name)
            record = self.pool.catalog.changed(request)
            if record != before:
                await self._store.model(record.model_id, record, before)
                self.pool.model_put(record, request.origin)
        if record != before:
            changed = {field: getattr(record, field) for field in WISHES}
            self.log.info("model changed", model=record.name, **changed)
            self._publish(record, request)
        return Models(records=(record,))

    def _publish(self, record: ModelRecord, request: Message) -> None:
        added = ModelAdded(record=record, trace=request.trace, cause=request.origin)
        self._send(subjects.POOL_MODELS, added)

    async def _remove_model(self, request: ModelRemove) -> Ok:
        async with self._catalog_lock:
            record = self.pool.catalog.removable(request.name)
            await self._store.model(record.model_id, None, record)
            self.pool.catalog.remove(record.name)
        self.log.info("model removed", model=record.name, model_id=record.model_id)
        removed = ModelRemoved(
            name=record.name,
            model_id=record.model_id,
            trace=request.trace,
            cause=request.origin,
        )
        self._send(subjects.POOL_MODELS, removed)
        return Ok()

    async def _models(self, request: ModelsQuery) -> Models:
        return Models(records=self.pool.catalog.records, keeps_access=True)

    async def _access(self, request: AccessQuery) -> AccessPage:
        return self.access.page(request.since)

    async def _change_access(self, request: ChangeAccess) -> AccessPage:
        async with self._access_lock:
            record = self.access.changed(request.change, clock.wall_ns())
            revision = await self._store.access(record)
            self.access.put(record, revision)
        change = str(request.change.__struct_config__.tag)
        self.log.info("access changed", change=change, id=record.id, revision=revision)
        return AccessPage(records=(record,), revision=revision)

    async def _sources(self, request: SourcesQuery) -> Sources:
        await self._reconciled.wait()
        record = self.pool.catalog.get(request.model_id)
        capability = b""
        if request.reader and record is not None and record.base:
            capability = self._capability(record, request.reader, LIFETIME_S)
        return Sources(sources=self.pool.sources(request.model_id), capability=capability)

    async def _reserve(self, request: Reserve) -> Reserved:
        await self._reconciled.wait()
        self.pool.at = clock.now()
        targets, effects = self.pool.reserve(request)
        self._follow(effects)
        if not all(target.keeps_room for target in targets):
            await self._store.settled(STORED_WAIT_S)
        return Reserved(
            targets=tuple(target.info for target in targets),
            reasons=tuple(target.reason for target in targets),
        )

    async def _unreserve(self, request: Unreserve) -> Ok:
        self.pool.at = clock.now()
        self._follow(self.pool.unreserve(request))
        await self._store.settled(STORED_WAIT_S)
        return Ok()

    async def _view(self, request: PoolQuery) -> PoolPage:
        await self._reconciled.wait()
        return self.pool.page(request)

    async def _nodes(self, request: NodesQuery) -> Nodes:
        await self._reconciled.wait()
        return self.pool.nodes(request)

    async def _copies(self, request: CopiesQuery) -> PoolCopies:
        await self._reconciled.wait()
        return copies_view(self.pool)

    async def _leave(self, request: Leave) -> MayLeave:
        await self._reconciled.wait()
        waits_for, effects = self.pool.leave(request, clock.now(), clock.wall_ns())
        self._follow(effects)
        return MayLeave(waits_for=waits_for)

    async def _set_duty(self, request: SetDuty) -> Nodes:
        await self._reconciled.wait()
        self._follow(self.pool.set_duty(request, clock.now(), clock.wall_ns()))
        await self._store.settled(STORED_WAIT_S)
        info = self.pool.leases.info(request.node)
        return Nodes(nodes=() if info is None else (info,))

    async def _story(self, request: StoryQuery) -> Told:
        return Told.of(self.pool.story.of(request.subject), clock.now(), clock.wall_ns())

    # --- what nodes and time say ---

    async def _on_status(self, status: NodeStatus) -> None:
        self._follow(self.pool.status(status, clock.now()))

    async def _pulse(self) -> None:
        while True:
            with suppress(BusError):  # that nothing is heard says it
                await self._bus.publish(subjects.REGISTRY_PULSE, Ping())
            await asyncio.sleep(PULSE_S)

    async def _on_pulse(self, pulse: Ping) -> None:
        self.pool.leases.hear(clock.now())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            with self.contain("the tick"):
                self._follow(self.pool.tick(clock.now(), clock.wall_ns()))

    async def _reconcile(self) -> None:
        await self._leases.complete.wait()
        self._send(subjects.POOL_REPORT, ReportStatus(cause="restart"))
        await asyncio.sleep(self._config.report_s)
        self._reconciled.set()
        self.pool.start(clock.now())
        self.log.info("reconciled", nodes=len(self.pool.leases.present))

    # --- what follows ---

    def _follow(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            with self.contain("what follows", effect=type(effect).__name__):
                self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case NodeJoined(info=info, cause=cause):
                self.log.info(
                    "node joined", node=info.node, generation=info.generation, cause=cause
                )
                self._store.node(info.node, self.pool.leases.info(info.node))
                self._send(subjects.POOL_NODES, effect)
            case NodeGone(node=node):
                self._store.node(node, self.pool.leases.info(node))
                self._send(subjects.POOL_NODES, effect)
                self._on_gone(effect)
            case DutySaid(node=node, duty=duty):
                self.log.info("duty said", node=node, duty=duty.duty.value if duty else "all")
                self._store.duty(node, duty)
            case StatusWanted(node=node):
                self._send(subjects.node_report(node), ReportStatus(cause="gap"))
            case CopyDropped():
                self.spawn(self._order_drop(effect), name="drop a copy", contained=True)
            case CopyOrdered():
                self.spawn(self._order(effect), name="order a copy", contained=True)
            case ReservationMade(reservation=held):
                self.log.info("node reserved", node=held.node, event_id=held.event)
                self._store.reservation(held.node, self.pool.reservations.of(held.node))
            case ReservationEnded(reservation=held, reason=reason):
                self.log.info(
                    "reservation ended", node=held.node, event_id=held.event, reason=reason
                )
                self._store.reservation(held.node, self.pool.reservations.of(held.node))
            case ModelSkipped(model_id=model, error=error):
                with self.contain("seeing to copies", model_id=model):
                    raise error

    async def _order(self, order: CopyOrdered) -> None:
        info = order.info
        self.log.info(
            "copy ordered", model_id=order.model_id, node=info.node, tier=order.tier.value
        )
        message = KeepCopy(
            node=info.node,
            generation=info.generation,
            model_id=order.model_id,
            sources=order.sources,
            bytes_per_s=order.bytes_per_s,
            tier=order.tier,
            capability=self._capability_of(order),
            cause=order.cause,
        )
        subject = subjects.node_keep(info.node)
        try:
            await self._bus.request(subject, message, Ok, timeout=ORDER_TIMEOUT_S)
        except LambdaScaleError as error:
            self.log.warning("copy refused", node=info.node, error=str(error))
            self.pool.order_failed(order, str(error), clock.now())

    def _capability_of(self, order: CopyOrdered) -> bytes:
        """For twice the time that the copy takes at its rate, and a while."""
        record = self.pool.catalog.get(order.model_id)
        if record is None:
            return b""
        lasts_s = LIFETIME_S + 2 * record.nbytes / order.bytes_per_s
        return self._capability(record, order.info.node, lasts_s)

    def _capability(self, record: ModelRecord, reader: NodeId, lasts_s: float) -> bytes:
        """Lets the node read all of the model."""
        if self._signer is None:
            return b""
        until_ns = clock.wall_ns() + round(lasts_s * 1e9)
        return self._signer.sign(reader, record.model_id, range(record.n_blocks), until_ns)

    async def _order_drop(self, dropped: CopyDropped) -> None:
        info = dropped.info
        self.log.info("copy gives way", model_id=dropped.model_id, node=info.node, why=dropped.why)
        message = DropCopy(
            node=info.node,
            generation=info.generation,
            model_id=dropped.model_id,
            why=dropped.why,
            cause=dropped.cause,
        )
        subject = subjects.node_drop(info.node)
        try:
            await self._bus.request(subject, message, Ok, timeout=ORDER_TIMEOUT_S)
        except LambdaScaleError as error:  # what is still missing is ordered again
            self.log.warning("copy stays", node=info.node, error=str(error))

    def _on_gone(self, gone: NodeGone) -> None:
        self.log.warning(
            "node gone",
            node=gone.node,
            generation=gone.generation,
            reason=gone.reason,
            cause=gone.cause,
        )
        if not self._reconciled.is_set():
            return
        for record, copies in self.pool.copies_after(gone):
            if copies.missing:
                self.log.error("blocks lost", model=record.name, blocks=len(copies.missing))
            elif not copies.safe:
                self.log.warning("no full copy in memory", model=record.name, disk=copies.disk)

    def _send(self, subject: str, message: Message) -> None:
        self._outbox.put_nowait((subject, message))

    async def _announce(self) -> None:
        """Publishes in order. A message that the bus does not take now is offered again until it
        does; one that cannot be published is logged and left out. Who listens asks for the whole
        now and then."""
        while True:
            subject, message = await self._outbox.get()
            try:
                await self._publish_patiently(subject, message)
            except Superseded:
                raise  # this process has lost its role, and ends
            except BaseException as error:
                if not is_containable(error):
                    raise
                self.failures += 1
                self.log.error("an announcement failed", subject=subject, exc_info=error)
            self._outbox.task_done()

    async def _publish_patiently(self, subject: str, message: Message) -> None:
        while True:
            try:
                await self._bus.publish(subject, message)
                return
            except MessageTooLarge:
                raise  # the bus will not take it later, either
            except BusError as error:
                self.log.warning("announcement held back", subject=subject, error=str(error))
                await asyncio.sleep(RETRY_S)


def _keeping(config: RegistryConfig, copies: int, after_s: float) -> Keeping:
    return Keeping(
        copies=copies,
        after_s=after_s,
        at_a_time=config.copies_at_a_time,
        bytes_per_s=config.copy_bytes_per_s,
    )
