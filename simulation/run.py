"""Runs one system under one setting, from the first request to the last token."""

import asyncio
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from services.gateway.frontend import Frontend
from shared import subjects
from shared.bus.base import On
from shared.clock import now
from shared.ids import EventId, RequestId
from shared.messages.changes import whole_set
from shared.messages.instances import (
    InstanceChange,
    InstanceSet,
    InstanceSets,
    InstancesQuery,
)
from shared.messages.pool import Tier
from shared.messages.scaling import EventChanged, EventRecord
from simulation import loop, systems
from simulation.clients import Bins, Replay
from simulation.cluster import Cluster, ClusterSpec, serves_alone
from simulation.engine import token_of
from simulation.hardware import hardware
from simulation.loop import EPOCH_NS
from simulation.models import model
from simulation.results import EventResult, RequestResult, Sample, SystemRun
from simulation.setting import Setting
from simulation.traces import Row

CHUNKS = 4
"""Chunks of a block. Relays then begin within a quarter of a block's time, which is close to what
they really do. More chunks would take longer to simulate."""
SAMPLE_S = 0.25
BIN_S = 0.1
TAIL_S = 10.0
"""How long the cluster is watched after the last token."""
ASK_S = 2.0
"""Seconds in which the planner answers."""
LIMIT_S = 7 * 86400.0
"""The most virtual seconds for a run that does not end."""


def spec_of(system: str, setting: Setting) -> ClusterSpec:
    named = systems.named(system)
    return ClusterSpec(
        # Systems that turned requests away could not be compared.
        system=replace(named, routing=replace(named.routing, refuses=False)),
        hardware=hardware(setting.hardware),
        models=tuple(model(architecture, name) for name, architecture in setting.models),
        nodes=setting.nodes,
        racks=setting.racks,
        chunks=CHUNKS,
        slots=setting.slots,
        min_instances=setting.min_instances,
        idle_s=setting.keep_alive_s,
        target=named.target if setting.target is None else setting.target,
        disk_copies=0 if named.every_disk else setting.disk_copies,
        seed=setting.seed,
        objectives=setting.objectives,
        checked=False,
    )


def run_system(system: str, setting: Setting, progress: Callable[[float], None]) -> SystemRun:
    """`progress` is called with the virtual time, in seconds of the trace, once every second of
    it."""
    return run_cluster(spec_of(system, setting), setting.trace, setting.seed, progress)


def run_cluster(
    spec: ClusterSpec,
    trace: Sequence[Row],
    seed: int,
    progress: Callable[[float], None] = lambda _: None,
) -> SystemRun:
    """Runs any cluster. The trace's models are the spec's."""
    began, cpu_began = time.perf_counter(), time.process_time()
    watch = loop.run(_run(spec, trace, progress), seed=seed, limit_s=LIMIT_S)
    return result(
        spec.system.name,
        watch,
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
    )


def result(system: str, watch: "Watch", *, wall_s: float = 0.0, cpu_s: float = 0.0) -> SystemRun:
    return SystemRun(
        system=system,
        requests=tuple(watch.results),
        events=tuple(watch.events()),
        samples=tuple(watch.samples),
        token_bin_s=BIN_S,
        tokens_by_bin=tuple(watch.bins.counts),
        virtual_s=watch.end_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


async def _run(
    spec: ClusterSpec, trace: Sequence[Row], progress: Callable[[float], None]
) -> "Watch":
    async with Cluster(spec) as cluster:
        return await watched(cluster, trace, progress)


async def watched(
    cluster: Cluster, trace: Sequence[Row], progress: Callable[[float], None] = lambda _: None
) -> "Watch":
    """What is seen of a cluster while it serves the trace."""
    await cluster.serving()
    await asyncio.sleep(TAIL_S)
    watch = Watch(cluster)
    await watch.begin()
    ticker = asyncio.create_task(watch.tick(progress))
    await _replay(cluster, trace, watch)
    await asyncio.sleep(TAIL_S)
    ticker.cancel()
    watch.end_s = now() - watch.start
    return watch


async def _replay(cluster: Cluster, trace: Sequence[Row], watch: "Watch") -> None:
    architectures = {m.name: m for m in cluster.spec.models}
    open_requests: set[Replay] = set()
    idle = asyncio.Event()

    def ended(replay: Replay) -> None:
        open_requests.discard(replay)
        watch.results.append(replay.result(watch.start))
        if not open_requests:
            idle.set()

    frontend: Frontend = cluster.gateway.frontend
    for number, row in enumerate(trace):
        delay = watch.start + row.arrival_s - now()
        if delay > 0:
            await asyncio.sleep(delay)
        replay = Replay(
            RequestId(f"req-{number}"),
            row.model,
            cluster.model_ids[row.model],
            row.prompt_tokens,
            row.output_tokens,
            partial(_token, architectures[row.model].vocab),
            watch.bins,
            ended,
        )
        open_requests.add(replay)
        idle.clear()
        replay.begin(frontend)
    if open_requests:
        await idle.wait()


def _token(vocab: int, request: RequestId, index: int) -> int:
    return token_of(request, index, vocab)


class Watch:
    """What is seen of a cluster from outside while it serves."""

    def __init__(self, cluster: Cluster) -> None:
        self.start = now()
        self.end_s = 0.0
        self.results: list[RequestResult] = []
        self.samples: list[Sample] = []
        self.bins = Bins(self.start, BIN_S)
        self._cluster = cluster
        self._records: dict[EventId, EventRecord] = {}
        self._sets: dict[str, InstanceSet] = {}

    async def begin(self) -> None:
        bus = self._cluster.bus
        await bus.subscribe(subjects.EVENTS, On(EventChanged, self._on_event))
        sets = On(InstanceSet, self._on_instances), On(InstanceChange, self._on_change)
        await bus.subscribe(subjects.INSTANCES, *sets)
        query = InstancesQuery()  # what is said from now on is mostly what has changed
        known = await bus.request(subjects.PLANNER_INSTANCES, query, InstanceSets, timeout=ASK_S)
        for each in known.sets:
            await self._on_instances(each)

    async def tick(self, progress: Callable[[float], None]) -> None:
        while True:
            sample = self._sample()
            if not self.samples or _differ(sample, self.samples[-1]):
                self.samples.append(sample)
            progress(now() - self.start)
            await asyncio.sleep(SAMPLE_S)

    def events(self) -> list[EventResult]:
        return [self._event(record) for record in self._records.values()]

    async def _on_event(self, message: EventChanged) -> None:
        self._records[message.record.id] = message.record

    async def _on_instances(self, message: InstanceSet) -> None:
        self._sets[message.name] = message

    async def _on_change(self, message: InstanceChange) -> None:
        if found := whole_set(self._sets.get(message.now.name), message):
            self._sets[found.name] = found

    def _sample(self) -> Sample:
        unit = self._cluster.spec.unit
        sizes = {
            self._cluster.model_ids[m.name]: manifest.nbytes
            for m, manifest in zip(self._cluster.spec.models, self._cluster.manifests, strict=True)
        }
        gpus, host = 0, 0.0
        for name, node in self._cluster.nodes.items():
            holdings = node.in_memory()
            gpus += any(holding.tier is Tier.GPU for holding in holdings)
            host += self._cluster.parts[name].host_cache_bytes
            for holding in holdings:
                if holding.tier in (Tier.HOST, Tier.CACHE):
                    host += sizes[holding.model_id] * unit
        serving = sum(serves_alone(i) for s in self._sets.values() for i in s.instances)
        return Sample(now() - self.start, gpus, serving, host)

    def _event(self, record: EventRecord) -> EventResult:
        decided = (record.decided_ns - EPOCH_NS) / 1e9 - self.start
        actual = record.actual

        def after(seconds: float | None) -> float | None:
            return None if seconds is None else decided + seconds

        return EventResult(
            model=record.name,
            state=record.state.value,
            strategy=record.strategy,
            sources=len(record.sources),
            targets=len(record.targets),
            decided_s=decided,
            first_path_s=after(actual.first_path_s),
            first_complete_s=after(actual.first_complete_s),
            all_complete_s=after(actual.all_complete_s),
            predicted_s=record.predicted.all_complete_s,
            bytes_moved=record.bytes_moved * self._cluster.spec.unit,
        )


def _differ(one: Sample, other: Sample) -> bool:
    return (one.gpus, one.serving, one.host_bytes) != (other.gpus, other.serving, other.host_bytes)
