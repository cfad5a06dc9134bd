"""Node services in one process, on a memory bus with a real registry; the test is the planner."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from services.node.keeper.link import KeeperLink
from services.node.real_parts import RealParts
from services.node.service import NodeService
from services.registry.service import RegistryService
from shared import subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import NodeConfig, RegistryConfig
from shared.ids import EventId, GatewayId, Generation, InstanceId, ModelName, NodeId, RequestId
from shared.messages import Message, Ok
from shared.messages.changes import whole_status
from shared.messages.instances import Stage
from shared.messages.pool import (
    ModelRecord,
    NodeInfo,
    NodeStatus,
    PoolState,
    ReportStatus,
    Tier,
)
from shared.messages.scaling import (
    ApplyPlan,
    BlockArrived,
    ImportModel,
    ModelImported,
    Pull,
    PullFailed,
    ReleaseModel,
)
from shared.messages.serving import AttemptFailed, Sampling, Submit, Token, Tokens
from shared.parts import Part
from shared.pool_pages import read_pool

WAIT_S = 100.0
NAME = ModelName("tiny")
GATEWAY = GatewayId("g")
BLOCKS = 6
ALL = tuple(range(BLOCKS))
ARENA = 1 << 20
"""Room for one tiny model."""
PROMPT = (5, 9, 200, 17)


class Heard:
    """All that was said on a subject, in order."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._changed = asyncio.Event()

    async def hear(self, message: Message) -> None:
        self.messages.append(message)
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                self._changed.clear()
                await self._changed.wait()


class Nodes:
    """`nodes()` makes one."""

    def __init__(self, root: Path, checkpoint: Path, stack: AsyncExitStack) -> None:
        self.broker = MemoryBroker()
        self.checkpoint = checkpoint
        self.arrivals, self.statuses, self.suspects, self.tokens = (Heard() for _ in range(4))
        self._root = root
        self._stack = stack
        self._running: dict[str, AsyncExitStack] = {}
        self.services: dict[str, NodeService] = {}
        self.record: ModelRecord

    async def open(self) -> None:
        self.bus = await self._stack.enter_async_context(MemoryBus(self.broker, "test"))
        for subject, heard in (
            (subjects.ARRIVALS, self.arrivals),
            (subjects.POOL_STATUS, self.statuses),
            (subjects.PLANNER_SUSPECT, self.suspects),
            (subjects.gateway_tokens(GATEWAY), self.tokens),
        ):
            await self.bus.subscribe(subject, On(Message, heard.hear))
        bus = await self._stack.enter_async_context(MemoryBus(self.broker, "registry"))
        config = RegistryConfig(
            report_s=0.0, durable_copies=1, host_copies=0
        )  # the test orders copies
        await self._stack.enter_async_context(RegistryService(bus, config))

    # --- nodes ---

    def config(self, name: str, **settings: Any) -> NodeConfig:
        defaults: dict[str, Any] = {
            "id": name,
            "machine": name,
            "data_dir": str(self._root / name),
            "arena_bytes": ARENA,
            "kv_bytes": 1 << 26,
            "threads": 1,
        }
        return NodeConfig(**(defaults | settings))

    async def start(
        self,
        name: str,
        *,
        bus: MemoryBus | None = None,
        keeper: KeeperLink | None = None,
        **settings: Any,
    ) -> NodeService:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(bus or MemoryBus(self.broker, name))
            config = self.config(name, **settings)
            service = NodeService(bus, config, RealParts(config))
            if keeper is not None:
                service._keeper = keeper
            await stack.enter_async_context(service)
            self._running[name] = stack.pop_all()
        self.services[name] = service
        return service

    async def stop(self, name: str) -> None:
        del self.services[name]
        await self._running.pop(name).aclose()

    async def close(self) -> None:
        for name in list(self._running):
            await self.stop(name)

    def info(self, name: str) -> NodeInfo:
        return self.services[name].info

    def has_on_disk(self, name: str) -> Path:
        """Puts the packed model onto a node's disk, before it is started; the model's folder."""
        target = self._root / name / "store" / self.record.model_id
        shutil.copytree(self._root / "a" / "store" / self.record.model_id, target)
        return target

    def stored(self, name: str) -> Path:
        return self._root / name / "store" / self.record.model_id

    def is_stored(self, name: str) -> bool:
        return self.stored(name).exists()

    # --- what a planner, operator or gateway asks ---

    async def request(self, subject: str, message: Message, reply: type[Any] = Ok) -> Any:
        return await self.bus.request(subject, message, reply, timeout=WAIT_S)

    async def import_model(
        self, name: str = "a", *, path: Path | str = "", called: str = NAME, blocks: int = BLOCKS
    ) -> ModelRecord:
        message = ImportModel(
            path=str(path or self.checkpoint), name=ModelName(called), blocks=blocks
        )
        subject = subjects.node_import(NodeId(name))
        imported: ModelImported = await self.request(subject, message, ModelImported)
        return imported.record

    def plan(
        self,
        name: str,
        pulls: Mapping[int, str] | None = None,
        *,
        promote: Iterable[int] = (),
        event: str = "ev-1",
        revision: int = 0,
        generation: int | None = None,
        epoch: int = 0,
        infos: Mapping[str, NodeInfo] | None = None,
        part: Part | None = None,
        devices: int = 1,
    ) -> ApplyPlan:
        """`pulls`: block -> source."""
        pulls = pulls or {}
        known = {n: self.info(n) for n in self.services} | dict(infos or {})
        return ApplyPlan(
            epoch=epoch,
            event=EventId(event),
            revision=revision,
            node=NodeId(name),
            generation=Generation(generation or self.info(name).generation),
            model_id=self.record.model_id,
            pulls=tuple(
                Pull(step, block, NodeId(source))
                for step, (block, source) in enumerate(pulls.items(), 1)
            ),
            promote=tuple(promote),
            peers=tuple(known[source] for source in sorted(set(pulls.values())) if source in known),
            part=part,
            devices=devices,
        )

    async def apply(
        self, name: str, pulls: Mapping[int, str] | None = None, **rest: Any
    ) -> ApplyPlan:
        plan = self.plan(name, pulls, **rest)
        await self.request(subjects.node_plan(NodeId(name)), plan)
        return plan

    async def release(self, name: str, keep: Tier | None = None, *, epoch: int = 0) -> None:
        message = ReleaseModel(
            epoch=epoch,
            node=NodeId(name),
            generation=self.info(name).generation,
            model_id=self.record.model_id,
            keep=keep,
        )
        await self.request(subjects.node_release(NodeId(name)), message)

    async def promoted(self, name: str) -> None:
        """The node has the whole model from its own disk."""
        await self.apply(name, promote=ALL, event=f"promote-{name}")
        await self.until_arrived(name, ALL)

    def stages(self, *names: str) -> tuple[Stage, ...]:
        """A path of equal stages."""
        cuts = [BLOCKS * i // len(names) for i in range(len(names) + 1)]
        return tuple(
            Stage(NodeId(name), self.info(name).address, start, stop)
            for name, start, stop in zip(names, cuts, cuts[1:], strict=False)
        )

    async def submit(self, *names: str, **changes: Any) -> None:
        """Over a path of equal stages."""
        subject = subjects.node_submit(NodeId(names[0]))
        await self.request(subject, self.submission(*names, **changes))

    def submission(
        self, *names: str, request: str = "r", max_tokens: int = 8, **changes: Any
    ) -> Submit:
        stages = self.stages(*names)
        submit = Submit(
            request=RequestId(request),
            attempt=1,
            gateway=GATEWAY,
            model_id=self.record.model_id,
            instance=InstanceId("i"),
            stages=stages,
            tokens=PROMPT,
            prompt_tokens=len(PROMPT),
            max_tokens=max_tokens,
            stop_ids=(),
            sampling=Sampling(),
        )
        return msgspec.structs.replace(submit, **changes)

    async def generate(self, *names: str, request: str = "r") -> list[int]:
        await self.submit(*names, request=request)
        await self.tokens.until(lambda: self.over(request))
        assert self.failure(request) is None
        tokens = self.tokens_of(request)
        assert [token.index for token in tokens] == list(range(len(tokens)))
        return [token.token for token in tokens]

    # --- what was heard ---

    def tokens_of(self, request: str) -> list[Token]:
        said = [m for m in self.tokens.messages if isinstance(m, Tokens)]
        return [token for m in said for token in m.tokens if token.request == request]

    def failure(self, request: str) -> AttemptFailed | None:
        said = [m for m in self.tokens.messages if isinstance(m, Tokens)]
        return next((f for m in said for f in m.failed if f.request == request), None)

    def over(self, request: str) -> bool:
        tokens = self.tokens_of(request)
        return self.failure(request) is not None or bool(tokens and tokens[-1].finish)

    def arrived(self, name: str, event: str | None = None) -> list[BlockArrived]:
        return [
            m
            for m in self.arrivals.messages
            if isinstance(m, BlockArrived) and m.node == name and event in (None, m.event)
        ]

    def failed(self, name: str) -> list[PullFailed]:
        return [m for m in self.arrivals.messages if isinstance(m, PullFailed) and m.node == name]

    async def until_arrived(
        self, name: str, blocks: Sequence[int], event: str | None = None
    ) -> list[BlockArrived]:
        await self.arrivals.until(
            lambda: {m.block for m in self.arrived(name, event)} >= set(blocks)
        )
        return self.arrived(name, event)

    async def until_failed(self, name: str, count: int = 1) -> list[PullFailed]:
        await self.arrivals.until(lambda: len(self.failed(name)) >= count)
        return self.failed(name)

    def status(self, name: str) -> NodeStatus | None:
        said = [m for m in self.statuses.messages if isinstance(m, NodeStatus) and m.node == name]
        order = [(s.generation, s.seq) for s in said]
        assert order == sorted(order)
        whole: NodeStatus | None = None
        for status in said:
            whole = whole_status(whole, status) or whole
        return whole

    def tiers(self, name: str) -> dict[Tier, tuple[int, ...]]:
        status = self.status(name)
        return {h.tier: h.blocks for h in status.holdings} if status else {}

    async def until_holds(self, name: str, tiers: Mapping[Tier, tuple[int, ...]]) -> None:
        """As the node says itself, asked now."""
        await self.bus.publish(subjects.POOL_REPORT, ReportStatus())
        try:
            await self.statuses.until(lambda: self.tiers(name) == tiers)
        except TimeoutError:
            raise AssertionError(f"{name} holds {self.tiers(name)}, not {tiers}") from None

    async def until_violations(self, name: str, count: int) -> None:
        await self.statuses.until(
            lambda: (status := self.status(name)) is not None and status.violations == count
        )

    async def pool(self) -> PoolState:
        return await read_pool(self.request)

    async def nothing_leaked(self, name: str) -> None:
        """All of the node's arena is free, and it says so."""

        def free() -> bool:
            status = self.status(name)
            return (
                status is not None
                and status.arena_free == self.info(name).arena_bytes
                and set(self.tiers(name)) <= {Tier.DISK}
            )

        await self.bus.publish(subjects.POOL_REPORT, ReportStatus())
        await self.statuses.until(free)


@asynccontextmanager
async def nodes(
    root: Path, checkpoint: Path, *names: str, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[Nodes]:
    """Nodes of these names; the first, `a`, has imported the model."""
    async with AsyncExitStack() as stack:
        made = Nodes(root, checkpoint, stack)
        await made.open()
        stack.push_async_callback(made.close)
        for name in names:
            await made.start(name, **(settings or {}))
        if names:
            made.record = await made.import_model(names[0])
        yield made
