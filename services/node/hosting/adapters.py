"""The LoRA adapters that a node has in memory: loaded when a request needs them, from this node's
disk or from the nearest node that has them.

They have a room of their own (`node.adapter_bytes`). What was used last stays in it. An adapter
that running sequences use is not given up. What cannot be loaded fails the requests that want it,
and nothing else.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from services.node.checkpoints.adapter import base_of, memory_of
from services.node.checkpoints.packing import digest
from services.node.checkpoints.reading import Unreadable, Wanted
from services.node.hosting.library import REGISTRY_TIMEOUT_S, Library
from services.node.hosting.pieces import pieces
from services.node.hosting.promotion import Spawn
from services.node.memory.recycled import Recycled
from services.node.moving.mover import permit_for, region_of
from services.node.parts import AnyDataPlane, AnyWorker
from shared import subjects, telemetry
from shared.bus.base import Bus
from shared.errors import (
    AdapterUnavailable,
    CapacityExceeded,
    Conflict,
    DigestMismatch,
    LambdaScaleError,
    NotFound,
    NotReady,
    as_typed,
)
from shared.ids import ModelId
from shared.layout import Manifest
from shared.messages import Ok
from shared.messages.pool import NodeInfo, Source, Sources, SourcesQuery
from shared.messages.serving import BringAdapter, Submit

PATIENCE_S = 2.0
"""How long a request waits for its adapter. Loading goes on after that, and gateways wait longer
for an answer."""
PIECE_S = 5.0
"""Seconds after which another node is asked for a piece."""
AT_A_TIME = 4
"""Pieces that are asked for at a time."""


@dataclass(slots=True, eq=False)
class _Held:
    base: ModelId
    nbytes: int
    loading: asyncio.Future[None]


class Adapters:
    def __init__(
        self,
        info: NodeInfo,
        nbytes: int,
        bus: Bus,
        library: Library,
        data: AnyDataPlane,
        worker: AnyWorker,
        log: BoundLogger,
        *,
        spawn: Spawn,
    ) -> None:
        """`nbytes`: the size of their room."""
        self._info = info
        self._nbytes = nbytes
        self._bus = bus
        self._library = library
        self._data = data
        self._worker = worker
        self._log = log
        self._spawn = spawn
        self._held: dict[ModelId, _Held] = {}
        """In the order of their last use."""
        self._making_room = asyncio.Lock()
        self._memory = Recycled()
        """Where the bytes of adapters come to."""

    async def everywhere(self, submit: Submit) -> None:
        """Has all stages of a request load its adapter. Errors of `ready`; BusError."""
        wanted = BringAdapter(adapter=submit.adapter, base=submit.model_id, cause=submit.origin)
        others = [
            self._bus.request(
                subjects.node_adapter(stage.node), wanted, Ok, timeout=PATIENCE_S + 0.5
            )
            for stage in submit.stages[1:]
        ]
        await asyncio.gather(self.ready(submit.adapter, submit.model_id), *others)

    async def ready(self, adapter: ModelId, base: ModelId) -> None:
        """Returns once requests can be run with the adapter. CapacityExceeded: those in use leave
        too little room. NotReady: it is still on its way. AdapterUnavailable."""
        held = self._held.pop(adapter, None)
        if held is None:
            held = _Held(base, 0, asyncio.get_running_loop().create_future())
            self._spawn(self._load(adapter, held), f"adapter {adapter}")
        self._held[adapter] = held  # the one that was used last
        if held.base != base:
            raise AdapterUnavailable(f"adapter {adapter} belongs to model {held.base}, not {base}")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.shield(held.loading)
        except TimeoutError:
            raise NotReady(f"adapter {adapter} is on its way to node {self._info.node}") from None

    async def forget(self, adapter: ModelId) -> None:
        """The adapter was removed. Sequences that run with it go on to their end."""
        held = self._held.get(adapter)
        if held is not None and held.loading.done():
            await self._give_up(adapter)

    # --- loading ---

    async def _load(self, adapter: ModelId, held: _Held) -> None:
        attributes: dict[str, telemetry.Attribute] = {"adapter": adapter, "node": self._info.node}
        try:
            with telemetry.span("load_adapter", parent=telemetry.here(), attributes=attributes):
                await self._bring(adapter, held)
        except asyncio.CancelledError:
            self._held.pop(adapter, None)
            held.loading.cancel()
            raise
        except Exception as error:  # one adapter's boundary
            self._held.pop(adapter, None)
            self._log.warning("adapter not loaded", adapter=adapter, error=repr(error))
            held.loading.set_exception(_told(adapter, error))
            held.loading.exception()  # nobody may be waiting any more
        else:
            held.loading.set_result(None)

    async def _bring(self, adapter: ModelId, held: _Held) -> None:
        manifest = await self._library.manifest(adapter)
        if base_of(manifest) != held.base:
            raise AdapterUnavailable(f"model {adapter} is no adapter of model {held.base}")
        async with self._making_room:
            await self._make_room(memory_of(manifest))
            held.nbytes = memory_of(manifest)
        make, buffer = await asyncio.gather(
            self._worker.expect_adapter(manifest), self._read(adapter, manifest)
        )
        await self._worker.adapt(adapter, make, buffer)

    async def _make_room(self, nbytes: int) -> None:
        if nbytes > self._nbytes:
            raise AdapterUnavailable(
                f"it takes {nbytes} bytes, and node {self._info.node} has {self._nbytes} for "
                "adapters: raise node.adapter_bytes"
            )
        for name in list(self._held):
            if self._used + nbytes <= self._nbytes:
                return
            held = self._held[name]
            if held.nbytes and held.loading.done():
                await self._give_up(name)
        if self._used + nbytes > self._nbytes:
            raise CapacityExceeded(
                f"all {self._nbytes} bytes for adapters of node {self._info.node} are in use"
            )

    @property
    def _used(self) -> int:
        return sum(held.nbytes for held in self._held.values())

    async def _give_up(self, adapter: ModelId) -> None:
        """Gives an adapter up, unless sequences run with it."""
        try:
            await self._worker.drop_adapter(adapter)
        except Conflict:
            return
        self._held.pop(adapter, None)

    # --- where it comes from ---

    async def _read(self, adapter: ModelId, manifest: Manifest) -> memoryview:
        if self._library.is_stored(adapter):
            into = self._memory.take(manifest.nbytes).memory
            async with aclosing(self._library.read(adapter, [Wanted(0, into)])) as outcomes:
                failed = [o.error async for o in outcomes if isinstance(o, Unreadable)]
            if not failed:
                return into
            self._log.warning("adapter not read", adapter=adapter, error=str(failed[0]))
        query = SourcesQuery(model_id=adapter, reader=self._info.node)
        answer = await self._bus.request(
            subjects.REGISTRY_SOURCES, query, Sources, timeout=REGISTRY_TIMEOUT_S
        )
        failure: LambdaScaleError = NotFound(f"no node has adapter {adapter} now")
        for source in self._nearest(answer.sources):
            # A read that is given up may still write for a while: not to where the next one reads.
            into = self._memory.take(manifest.nbytes).memory
            try:
                await self._fetch(adapter, manifest, source, answer.capability, into)
                return into
            except LambdaScaleError as error:
                failure = error
        raise failure

    def _nearest(self, sources: Sequence[Source]) -> list[Source]:
        """Whole copies on other nodes: those on this machine first, then those in this rack."""
        own = self._info
        others = [s for s in sources if s.complete and s.info.node != own.node]
        return sorted(others, key=lambda s: (s.info.host != own.host, s.info.rack != own.rack))

    async def _fetch(
        self,
        adapter: ModelId,
        manifest: Manifest,
        source: Source,
        capability: bytes,
        into: memoryview,
    ) -> None:
        turns = asyncio.Semaphore(AT_A_TIME)

        async def bring(chunks: range) -> None:
            offset, nbytes = manifest.run_range(0, chunks)
            piece = into[offset : offset + nbytes]
            async with turns:
                await self._data.fetch(
                    source.info.address,
                    region_of(adapter, 0),
                    offset,
                    piece,
                    permit=permit_for(adapter, capability),
                    within=PIECE_S,
                )
            for chunk in chunks:
                at, size = manifest.chunk_range(0, chunk)
                if digest(piece[at - offset :][:size]) != manifest.blocks[0].digests[chunk]:
                    raise DigestMismatch(f"chunk {chunk} of adapter {adapter} came damaged")

        brought = (bring(chunks) for chunks in pieces(manifest, 0))
        for failure in await asyncio.gather(*brought, return_exceptions=True):
            if failure is not None:
                raise failure


def _told(adapter: ModelId, error: Exception) -> LambdaScaleError:
    """What requests are told that wait for it."""
    if isinstance(error, CapacityExceeded | AdapterUnavailable):
        return error
    return AdapterUnavailable(f"adapter {adapter} cannot be loaded: {as_typed(error)}")
