"""Real node processes on a testbed, one on each host, driven as the planner drives them."""

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.testbed import CONTROL_GATE, Namespace, Testbed, data_address
from services.local.forking import PROGRAM, fork_server
from services.local.nats_server import NatsServer
from services.local.private import private_directory
from services.planner.core.multicast.schedule import Move
from services.planner.core.orders import WAVE_S, waves
from shared import subjects
from shared.bus.base import Bus, On
from shared.bus.nats import NatsBus
from shared.clock import wall_ns
from shared.config import BusConfig
from shared.errors import BusError, LambdaScaleError
from shared.forking import Forked, Order
from shared.ids import EventId, ModelName, NodeId, new_id
from shared.messages import Message, Ok
from shared.messages.pool import ModelRecord, NodeInfo
from shared.messages.scaling import (
    ApplyPlan,
    BlockArrived,
    ImportModel,
    ModelImported,
    Pull,
    PullFailed,
    ReleaseModel,
)
from shared.pool_pages import read_pool

READY_S = 60.0
READY_PER_NODE_S = 8.0
"""Seconds for each node to start, while all share the machine's cores."""
IMPORT_S = 120.0
REQUEST_S = 10.0
STOP_S = 20.0
POLL_S = 0.1
ARENA_SLACK = 1 << 20
KV_BYTES = 64 << 20
ONE_COPY = {"LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1"}
"""The registry moves nothing beside what is measured."""
LOG_TAIL = 5
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class BenchFailed(LambdaScaleError):
    code = "bench_failed"


@dataclass(frozen=True, slots=True)
class Run:
    """One multicast. Times are seconds since the decision."""

    makespan_s: float
    """Until the last block was verified on the last node."""
    first_byte_s: float
    """When the first target got its first byte."""
    cpu_s: float
    """CPU seconds of all processes."""


class Nodes:
    """nats-server and a registry in the hub, and nodes on the hosts: node n on host n.

    Enter it in the hub, on an event loop. `start` starts nodes, which stay until it is left.
    """

    def __init__(self, testbed: Testbed, directory: Path, model_bytes: int) -> None:
        self._testbed = testbed
        self._directory = directory
        self._arena_bytes = model_bytes + ARENA_SLACK
        self._fork_server = fork_server(self._log("fork-server"), os.environ)
        self._processes: dict[str, Forked] = {}
        self._infos: list[NodeInfo] = []
        self._watch: _Watch | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            private_directory(self._log("fork-server").parent)
            stack.callback(self._fork_server.stop)
            self._fork_server.start()
            nats = NatsServer(self._directory / "nats", host=CONTROL_GATE)
            self._nats = await stack.enter_async_context(nats)
            await self._fork_server.ready()
            stack.push_async_callback(self._stop)
            self._start("registry", "registry", self._testbed.hub, ONE_COPY)
            self._bus = await stack.enter_async_context(NatsBus(BusConfig(url=nats.url), "bench"))
            await self._bus.subscribe(subjects.ARRIVALS, On(Message, self._hear))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def start(self, count: int, settings: Mapping[str, str] | None = None) -> None:
        """Returns when `count` nodes are there, including those started before."""
        wiring = self._testbed.wiring
        for number in range(len(self._infos), count):
            name = _node(number)
            fixed = {
                "ID": name,
                "HOST": data_address(number),
                "MACHINE": name,
                "RACK": f"rack-{wiring.rack_of(number)}" if wiring.racks else "",
                "DATA_DIR": str(self._directory / name),
                "ARENA_BYTES": str(self._arena_bytes),
                "KV_BYTES": str(KV_BYTES),
                "CPU_WEIGHTS": "stored",  # else two cores would pack the copies of all nodes
                "THREADS": "1",
                "KEEP_WEIGHTS_S": "0",  # else keepers would outlive the benchmark
            }
            environment = {f"LAMBDASCALE_NODE_{key}": value for key, value in fixed.items()}
            host = self._testbed.hosts[number]
            self._start(name, "node", host, {**environment, **(settings or {})})
        await self._wait_for(count)

    async def load(self, checkpoint: Path, blocks: int, number: int = 0) -> ModelRecord:
        """Imports the model on a node and brings it up there, to be a source and to serve."""
        imported = await self._bus.request(
            subjects.node_import(_node(number)),
            ImportModel(
                path=str(checkpoint), name=ModelName("bench"), blocks=blocks, min_instances=1
            ),
            ModelImported,
            timeout=IMPORT_S,
        )
        record = imported.record
        watch = self._watching({(_node(number), block) for block in range(record.n_blocks)})
        await self._apply(record, watch.event, number, (), tuple(range(record.n_blocks)))
        await watch.wait(IMPORT_S)
        return record

    async def multicast(self, record: ModelRecord, moves: Iterable[Move], timeout_s: float) -> Run:
        """Runs a multicast to the nodes that the moves name. Afterwards they hold nothing again."""
        pulls: dict[int, list[Pull]] = {}
        for move in moves:
            pulls.setdefault(move.dst, []).append(Pull(move.step, move.block, _node(move.src)))
        watch = self._watching({(_node(n), p.block) for n, those in pulls.items() for p in those})
        cpu_s, decided = self._cpu_s(), wall_ns()
        telling: list[asyncio.Task[None]] = []
        for wave in waves({n: min(pull.step for pull in pulls[n]) for n in pulls}):
            begun = [
                asyncio.create_task(self._apply(record, watch.event, n, pulls[n], ())) for n in wave
            ]
            await asyncio.wait(begun, timeout=WAVE_S)
            telling += begun
        await asyncio.gather(*telling)
        await watch.wait(timeout_s)
        cpu_s = self._cpu_s() - cpu_s
        await asyncio.gather(*(self._release(record, node) for node in pulls))
        return Run(
            (watch.finished_ns - decided) / 1e9, (watch.first_byte_ns - decided) / 1e9, cpu_s
        )

    @property
    def bus(self) -> Bus:
        return self._bus

    def info(self, number: int) -> NodeInfo:
        return self._infos[number]

    def cpu_s(self, number: int) -> float:
        """CPU seconds of the node's process so far, user and system time."""
        return _cpu_s(self._processes[_node(number)])

    # --- nodes ---

    async def _apply(
        self,
        record: ModelRecord,
        event: EventId,
        number: int,
        pulls: Sequence[Pull],
        promote: tuple[int, ...],
    ) -> None:
        sources = {pull.source for pull in pulls}
        info = self._infos[number]
        plan = ApplyPlan(
            event=event,
            revision=1,
            node=info.node,
            generation=info.generation,
            model_id=record.model_id,
            pulls=tuple(pulls),
            promote=promote,
            peers=tuple(peer for peer in self._infos if peer.node in sources),
        )
        await self._bus.request(subjects.node_plan(info.node), plan, Ok, timeout=REQUEST_S)

    async def _release(self, record: ModelRecord, number: int) -> None:
        info = self._infos[number]
        release = ReleaseModel(
            node=info.node, generation=info.generation, model_id=record.model_id, keep=None
        )
        await self._bus.request(subjects.node_release(info.node), release, Ok, timeout=REQUEST_S)

    def _watching(self, wanted: "set[tuple[NodeId, int]]") -> "_Watch":
        self._watch = _Watch(wanted)
        return self._watch

    async def _hear(self, message: Message) -> None:
        if self._watch is not None:
            self._watch.hear(message)

    # --- processes ---

    def _start(
        self, name: str, role: str, namespace: Namespace, settings: Mapping[str, str]
    ) -> None:
        environment = {**os.environ, "LAMBDASCALE_BUS_URL": self._nats.url, **settings}
        order = Order(name, PROGRAM, (role,), environment, str(self._log(name)), namespace.path)
        self._processes[name] = self._fork_server.fork(order)

    async def _wait_for(self, count: int) -> None:
        try:
            async with asyncio.timeout(READY_S + READY_PER_NODE_S * count):
                while len(infos := await self._pool()) < count:
                    self._check_processes()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise BenchFailed(
                f"{len(infos)} of {count} nodes were ready in time; logs are in {self._directory}"
            ) from None
        self._infos = [infos[_node(number)] for number in range(count)]

    async def _pool(self) -> dict[NodeId, NodeInfo]:
        try:
            pool = await read_pool(partial(self._bus.request, timeout=REQUEST_S))
        except BusError:  # the registry is still starting
            return {}
        return {view.info.node: view.info for view in pool.nodes}

    def _check_processes(self) -> None:
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                lines = self._log(name).read_text(errors="replace").splitlines()[-LOG_TAIL:]
                raise BenchFailed("\n".join([f"{name} ended with {code}", *lines]))

    async def _stop(self) -> None:
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        for process in self._processes.values():
            try:
                await asyncio.to_thread(process.wait, STOP_S)
            except TimeoutError:
                _signal(process, signal.SIGKILL)
                process.wait()

    def _cpu_s(self) -> float:
        return sum(map(_cpu_s, self._processes.values()))

    def _log(self, name: str) -> Path:
        return self._directory / "logs" / f"{name}.log"


class _Watch:
    """The blocks that an event should bring, as they arrive."""

    def __init__(self, wanted: set[tuple[NodeId, int]]) -> None:
        self.event = EventId(new_id("ev"))
        self.first_byte_ns = 0
        self.finished_ns = 0
        self._left = wanted
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def hear(self, message: Message) -> None:
        if self._over.done():
            return
        if isinstance(message, BlockArrived) and message.event == self.event:
            self._left.discard((message.node, message.block))
            self.finished_ns = max(self.finished_ns, message.finished_ns)
            first = self.first_byte_ns or message.first_byte_ns
            self.first_byte_ns = min(first, message.first_byte_ns)
            if not self._left:
                self._over.set_result(None)
        elif isinstance(message, PullFailed) and message.event == self.event:
            self._over.set_exception(
                BenchFailed(f"{message.node} did not get block {message.block}: {message.message}")
            )

    async def wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._over, timeout_s)
        except TimeoutError:
            raise BenchFailed(
                f"{len(self._left)} blocks did not arrive within {timeout_s:.0f} s"
            ) from None


def _node(number: int) -> NodeId:
    return NodeId(f"node-{number}")


def _signal(process: Forked, number: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):  # it has ended just now
            os.kill(process.pid, number)


def _cpu_s(process: Forked) -> float:
    """CPU seconds of the process so far, user and system time."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S
