"""Looks at the cluster for the pages that are open (`core/scene.py`), and at nothing while none is.

The planner and the registry remember what happened (`shared/messages/chronicle.py`), so a page that
is opened late shows what is over. They are asked about what has changed only, except for the pool:
that takes longer the larger it is, and is asked for the more seldom.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import msgspec

from services.gateway.api_error import ApiError
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.latencies import Latencies
from services.gateway.core.scene import Scene
from shared import subjects
from shared.bus.base import Bus, M
from shared.clock import now, wall_ns
from shared.errors import LambdaScaleError
from shared.event_pages import read_event
from shared.ids import EventId, GatewayId, ModelId, ModelName
from shared.messages import Message
from shared.messages.chronicle import Chronicle, ChronicleQuery, Count, EventPast, EventQuery, Rate
from shared.messages.copies import CopiesQuery, PoolCopies
from shared.messages.decisions import Decided
from shared.messages.pool import NodeView, PoolState
from shared.messages.scaling import EventRecord
from shared.pool_pages import read_pool
from shared.version import __version__

MOST_PAGES = 32
"""Pages that may be open at a gateway."""
PLANNER_S = 0.5
EVENT_S = 0.2
"""Seconds between questions while a scaling event runs."""
POOL_S = 2.0
POOL_SHARE = 0.02
"""The most of the time that reading the pool may take."""
OVERLAP_S = 2.0
"""What the planner is asked for again: an item may have been noted just after the last answer."""
TIMEOUT_S = 2.0
FOLLOWED = 4
"""How many of the newest events are shown block by block at once. Pages ask for others."""
ARRIVALS = 100_000
COUNTS = 5000
DECISIONS = 100
RATES = 2400
LATELY_S = 600.0
"""How far back the latencies of calls are summed up."""
ALL = "all"
"""The key of what concerns no model alone."""
_Row = Count | Rate | Decided


@dataclass(slots=True)
class _Look:
    """What has been seen since the first of the pages was opened."""

    scene: Scene = field(default_factory=Scene)
    asked_at: float = -inf
    """When the planner was asked the last question that it answered."""
    newest: dict[tuple[str, str], int] = field(default_factory=dict)
    """The time of the newest row of a series, in ns."""
    arrived: dict[EventId, int] = field(default_factory=dict)
    """How many arrivals are known of each event that is followed."""
    settled: set[EventId] = field(default_factory=set)
    """Followed events of which nothing more is expected."""
    missing: dict[str, str] = field(default_factory=dict)
    """Services that do not answer, and what was heard instead."""

    def add(self, section: str, key: str, rows: Sequence[_Row], most: int) -> None:
        """Adds what is newer than what is known."""
        newest = self.newest.get((section, key), -1)
        new = [row for row in rows if row.at_ns > newest]
        if new:
            self.newest[section, key] = new[-1].at_ns
            self.scene.add(section, key, new, most)


class Lookout:
    def __init__(
        self, bus: Bus, dispatch: Dispatch, latencies: Latencies, own: Callable[[], GatewayId]
    ) -> None:
        """`own`: this gateway's id, now."""
        self._bus = bus
        self._dispatch = dispatch
        self._latencies = latencies
        self._own = own
        self._pages = 0
        self._look = _Look()
        self._looked_at = asyncio.Event()
        """Set while pages are open."""

    @property
    def looks(self) -> bool:
        """Whether a page is open."""
        return self._pages > 0

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Scene]:
        """While a page is open. ApiError 503 if too many are."""
        if self._pages >= MOST_PAGES:
            message = f"{MOST_PAGES} pages are open at this gateway: close one"
            raise ApiError(503, message, code="too_many_pages", retry_after=5)
        self._pages += 1
        self._looked_at.set()
        try:
            yield self._look.scene
        finally:
            self._pages -= 1
            if not self._pages:
                self._looked_at.clear()
                self._look = _Look()

    async def event(self, id_: EventId) -> EventPast:
        """All that is known of an event. NotFound."""
        return await read_event(self._ask, id_)

    async def _ask(self, subject: str, message: Message, reply: type[M]) -> M:
        return await self._bus.request(subject, message, reply, timeout=TIMEOUT_S)

    # --- the planner ---------------------------------------------------------

    async def ask_planner(self) -> float:
        """Returns after how many seconds to call it again."""
        await self._looked_at.wait()
        look, busy = self._look, False
        try:
            busy = await self._learn_past(look)
        except LambdaScaleError as error:
            look.missing["planner"] = str(error)
        else:
            look.missing.pop("planner", None)
        self._look_here(look)
        return EVENT_S if busy else PLANNER_S

    async def _learn_past(self, look: _Look) -> bool:
        """Returns whether an event runs."""
        began, scene = now(), look.scene
        last_s = 0.0 if look.asked_at == -inf else began - look.asked_at + OVERLAP_S
        query = ChronicleQuery(last_s=last_s)
        told = await self._ask(subjects.PLANNER_CHRONICLE, query, Chronicle)
        look.asked_at = began
        scene.put("events", {r.id: _shown(r) for r in told.events}, all_there_are=False)
        for model in told.models:
            look.add("counts", model.name, model.counts, COUNTS)
            look.add("decisions", model.name, model.decisions[::-1], DECISIONS)
        look.add("rates", ALL, told.rates, RATES)
        busy = False
        for record in told.events[:FOLLOWED]:
            if record.id not in look.settled:
                busy = await self._follow(look, record.id) or busy
        return busy

    async def _follow(self, look: _Look, event: EventId) -> bool:
        """Returns whether the event runs."""
        scene, known = look.scene, look.arrived.get(event, 0)
        query = EventQuery(event=event, after=known)
        past = await self._ask(subjects.PLANNER_EVENT, query, EventPast)
        scene.add("arrivals", event, past.arrivals, ARRIVALS)
        look.arrived[event] = known + len(past.arrivals)
        trail = {"forgotten": past.forgotten, "served": past.served}
        scene.put("trails", {event: trail}, all_there_are=False)
        over = bool(past.record.ledger)
        paths = (served for served in past.served if not served.lasts)
        if over and all(path.ended_ns for path in paths) and known >= past.arrived:
            look.settled.add(event)
        for old in list(look.arrived)[: -2 * FOLLOWED]:
            del look.arrived[old]
            scene.drop("arrivals", old)
        return not over

    def _look_here(self, look: _Look) -> None:
        """What this gateway knows by itself."""
        look.scene.put(
            "instances",
            {
                instance.id: {
                    "model": name,
                    "state": instance.state,
                    "role": instance.role,
                    "slots": instance.slots,
                    "running": running,
                    "event": instance.event,
                    "stages": [(s.node, s.start, s.stop) for s in instance.stages],
                    "group": instance.group,
                }
                for name, instance, running in self._dispatch.instances()
            },
        )
        about = {"version": __version__, "gateway": self._own(), "missing": look.missing}
        look.scene.put("about", about)
        found = self._latencies.since(wall_ns() - int(LATELY_S * 1e9))
        look.scene.put("latencies", {f"{one.model} {one.tenant}": one for one in found})

    # --- the registry --------------------------------------------------------

    async def ask_registry(self) -> float:
        """Returns after how many seconds to call it again."""
        await self._looked_at.wait()
        look, began = self._look, now()
        try:
            pool = await read_pool(self._ask)
            copies = await self._ask(subjects.REGISTRY_COPIES, CopiesQuery(), PoolCopies)
        except LambdaScaleError as error:
            look.missing["registry"] = str(error)
        else:
            look.missing.pop("registry", None)
            _show_pool(look.scene, pool, copies)
        return max(POOL_S, (now() - began) / POOL_SHARE)


def _show_pool(scene: Scene, pool: PoolState, copies: PoolCopies) -> None:
    names = {record.model_id: record.name for record in pool.models}
    tiers = {tiers.node: tiers for tiers in copies.nodes}
    nodes: dict[str, dict[str, object]] = {
        view.info.node: _node(view, names) for view in pool.nodes
    }
    for node, found in tiers.items():
        if node in nodes:
            nodes[node] |= {
                "machine": found.machine,
                "host": (found.host_bytes - found.host_free, found.host_bytes),
                "disk": (found.disk_bytes - found.disk_free, found.disk_bytes),
            }
    scene.put("nodes", nodes)
    of_copies = {model.name: model for model in copies.models}
    scene.put(
        "models",
        {
            record.name: {
                "id": record.model_id,
                "nbytes": record.nbytes,
                "n_blocks": record.n_blocks,
                "task": record.task,
                "embeds": record.embeds,
                "least": record.min_instances,
                "most": record.max_instances,
                "priority": record.priority,
                "ttft_s": record.ttft_s,
                "tpot_s": record.tpot_s,
                "copies": of_copies.get(record.name),
            }
            for record in pool.models
        },
    )


def _node(view: NodeView, names: dict[ModelId, ModelName]) -> dict[str, object]:
    info = view.info
    return {
        "machine": info.host,
        "rack": info.rack,
        "device": info.device,
        "duty": info.duty,
        "unfit": view.unfit,
        "event": view.reserved_by,
        "slots": info.slots,
        "link": info.link_bytes_per_s,
        "arena": (max(0, info.arena_bytes - view.arena_free), info.arena_bytes),
        "kv": (view.kv_used, view.kv_capacity),
        "running": view.running,
        "holds": [
            (names.get(held.model_id, held.model_id), held.tier, len(held.blocks))
            for held in view.holdings
        ],
    }


def _shown(record: EventRecord) -> EventRecord:
    """Without what pages do not show."""
    return msgspec.structs.replace(record, transfers=(), trace="")
