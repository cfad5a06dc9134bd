"""Carries one scaling event from its decision to its end: the shell around `core/events`."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import Span
from structlog.stdlib import BoundLogger

from services.planner.core import events
from services.planner.core.cluster import Cluster
from services.planner.core.forecast import forecast
from services.planner.core.placement import (
    Roles,
    assign_roles,
    plan_transfers,
    repair_transfers,
)
from shared import subjects, telemetry
from shared.bus.base import Bus, M
from shared.clock import wall_ns
from shared.config import PlannerConfig
from shared.errors import BusError, LambdaScaleError, PlanError
from shared.ids import NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.pool import (
    ModelRecord,
    NodeGone,
    Reserve,
    Reserved,
    Sources,
    SourcesQuery,
    Tier,
    Unreserve,
)
from shared.messages.scaling import (
    ApplyPlan,
    BlockArrived,
    EventRecord,
    EventState,
    FirstPartialToken,
    Pull,
    PullFailed,
    Transfer,
)

REQUEST_TIMEOUT_S = 2.0
PING_TIMEOUT_S = 0.3
STALL_S = 5.0
"""No arrival for this long: plan again from what is held."""
MAX_STALLS = 3
IN_MEMORY = (Tier.GPU, Tier.HOST)


@dataclass(frozen=True, slots=True)
class Hooks:
    """How a run tells its model's controller what happened."""

    changed: Callable[[EventRecord], None]
    joined: Callable[[NodeId], None]
    """A node is a target now."""
    arrived: Callable[[NodeId, int], None]
    dropped: Callable[[NodeId], None]
    """A node is no target any more; whatever it holds may be freed."""


class EventRun:
    def __init__(
        self,
        bus: Bus,
        cluster: Cluster,
        config: PlannerConfig,
        model: ModelRecord,
        record: EventRecord,
        root: Span,
        log: BoundLogger,
        hooks: Hooks,
    ) -> None:
        self.record = record
        self._bus = bus
        self._cluster = cluster
        self._config = config
        self._model = model
        self._root = root
        self._log = log.bind(event_id=record.id, model=record.name)
        self._hooks = hooks
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._held: dict[NodeId, set[int]] = {}
        """Blocks of every source, and those that each target can execute so far."""
        self._promoting: set[NodeId] = set()
        self._distrusted: set[NodeId] = set()
        """Senders that failed to deliver; used again only if nobody else has a block."""

    def tell(self, message: Message) -> None:
        """A BlockArrived, PullFailed, NodeGone or FirstPartialToken that may concern this event."""
        self._inbox.put_nowait(message)

    @property
    def over(self) -> bool:
        return self.record.state in events.TERMINAL

    async def run(self, count: int, exclude: Iterable[NodeId]) -> None:
        """Reserves up to `count` targets, moves the model to them, ends in a terminal state."""
        try:
            await self._begin(count, tuple(exclude))
            await self._watch()
            self._advance(EventState.COMPLETE, "all_complete_s")
            self._log.info("event complete", seconds=self.record.actual.all_complete_s)
        except LambdaScaleError as error:
            self._log.warning("event failed", code=error.code, error=str(error))
            self._fail(str(error))
        finally:
            if not self.over:  # cancelled with the service
                self._set(events.advance(self.record, EventState.CANCELLED, wall_ns()))
            self._root.set_attributes(self._summary())
            self._root.end(end_time=wall_ns())
            await self._unreserve()

    # --- from the decision to the first bytes ---

    async def _begin(self, count: int, exclude: tuple[NodeId, ...]) -> None:
        with telemetry.span("plan", parent=self.record.trace) as span:
            reserve = Reserve(
                event=self.record.id,
                model_id=self._model.model_id,
                nbytes=self._model.nbytes,
                count=count,
                exclude=exclude,
            )
            reserved, sources = await asyncio.gather(
                self._ask(subjects.REGISTRY_RESERVE, reserve, Reserved),
                self._ask(
                    subjects.REGISTRY_SOURCES,
                    SourcesQuery(model_id=self._model.model_id),
                    Sources,
                ),
            )
            if not reserved.targets:
                raise PlanError("no node has room for another replica")
            targets = tuple(info.node for info in reserved.targets)
            roles = assign_roles(sources.sources, targets)
            self._plan(roles)
            span.set_attributes(
                {
                    "sources": ",".join(roles.sources),
                    "targets": ",".join(targets),
                    "strategy": self.record.strategy,
                    "transfers": len(self.record.transfers),
                }
            )
        for node in targets:
            self._hooks.joined(node)
        await self._send(targets)
        self._set(events.advance(self.record, EventState.TRANSFERRING, wall_ns()))

    def _plan(self, roles: Roles) -> None:
        blocks = self._model.n_blocks
        transfers = plan_transfers(roles, blocks, self.record.strategy)
        every = frozenset(range(blocks))
        for node in roles.sources:
            self._held[node] = set(every)
        for node in (*roles.promoting, *roles.receiving):
            self._held[node] = set(self._cluster.held(node, self._model.model_id, [Tier.GPU]))
        self._promoting = set(roles.promoting)
        links = {
            node: info.link_bytes_per_s or self._config.link_bytes_per_s
            for node in (*roles.sources, *roles.receiving)
            if (info := self._cluster.nodes.get(node))
        }
        outlook = forecast(
            transfers,
            roles,
            links,
            self._model.block_bytes,
            overhead_s=self._config.step_overhead_s,
            max_stages=self._config.max_stages,
        )
        record = msgspec.structs.replace(
            self.record,
            sources=roles.sources,
            targets=(*roles.promoting, *roles.receiving),
            transfers=transfers,
            predicted=outlook.predicted,
            physical_limit_s=outlook.physical_limit_s,
        )
        self._set(events.advance(record, EventState.PLANNED, wall_ns()))

    async def _send(self, targets: Iterable[NodeId]) -> None:
        """Gives every target its part; one that does not take it is dropped and planned around."""
        targets = tuple(targets)
        results = await asyncio.gather(
            *(self._send_one(node) for node in targets), return_exceptions=True
        )
        failed: list[NodeId] = []
        for node, result in zip(targets, results, strict=True):
            if isinstance(result, LambdaScaleError):
                self._log.warning("target refused its plan", node=node, error=str(result))
                failed.append(node)
            elif isinstance(result, BaseException):
                raise result
        if failed:
            self._drop(failed)
            await self._replan(f"targets dropped: {', '.join(failed)}")

    async def _send_one(self, node: NodeId) -> None:
        info = self._cluster.nodes.get(node)
        if info is None:
            raise PlanError(f"node {node} is gone")
        pulls = tuple(Pull(t.step, t.block, t.src) for t in self.record.transfers if t.dst == node)
        promote: tuple[int, ...] = ()
        if node in self._promoting:
            promote = tuple(b for b in range(self._model.n_blocks) if b not in self._held[node])
        peers = {pull.source for pull in pulls}
        apply = ApplyPlan(
            event=self.record.id,
            revision=self.record.revision,
            node=node,
            generation=info.generation,
            model_id=self._model.model_id,
            pulls=pulls,
            promote=promote,
            peers=tuple(self._cluster.nodes[peer] for peer in sorted(peers)),
            trace=self.record.trace,
        )
        await self._ask(subjects.node_plan(node), apply, Ok)

    # --- until everything has arrived ---

    def _incomplete(self) -> list[NodeId]:
        return [n for n in self.record.targets if len(self._held[n]) < self._model.n_blocks]

    async def _watch(self) -> None:
        stalls = 0
        while self._incomplete():
            try:
                async with asyncio.timeout(STALL_S):
                    message = await self._inbox.get()
            except TimeoutError as error:
                stalls += 1
                if stalls > MAX_STALLS:
                    waiting = ", ".join(self._incomplete())
                    raise PlanError(
                        f"no block arrived for {stalls * STALL_S:.0f} s; waiting: {waiting}"
                    ) from error
                await self._replan(f"no block arrived for {STALL_S:.0f} s")
                continue
            if isinstance(message, BlockArrived):
                stalls = 0
                self._on_arrived(message)
            elif isinstance(message, PullFailed):
                await self._on_pull_failed(message)
            elif isinstance(message, NodeGone):
                await self._on_gone(message.node)
            elif isinstance(message, FirstPartialToken) and message.stages > 1:
                self.on_partial_token(message)

    def _on_arrived(self, message: BlockArrived) -> None:
        if message.node not in self.record.targets:
            return
        self._held[message.node].add(message.block)
        moved = message.nbytes if message.source != message.node else 0
        self._set(
            events.note(
                msgspec.structs.replace(self.record, bytes_moved=self.record.bytes_moved + moved),
                message.first_byte_ns,
                "first_byte_s",
            )
        )
        if len(self._held[message.node]) == self._model.n_blocks:
            self._set(events.note(self.record, message.finished_ns, "first_complete_s"))
        self._hooks.arrived(message.node, message.block)

    def on_path(self) -> None:
        """The controller opened the first path over nodes that are still loading."""
        if self.record.state is EventState.TRANSFERRING:
            self._advance(EventState.SERVING, "first_path_s")

    def on_partial_token(self, message: FirstPartialToken) -> None:
        self._set(events.note(self.record, message.at_ns, "first_partial_token_s"))

    async def _on_pull_failed(self, message: PullFailed) -> None:
        if message.revision != self.record.revision or message.node not in self.record.targets:
            return  # answered by a newer revision already
        self._log.warning(
            "pull failed",
            node=message.node, source=message.source, block=message.block, code=message.code,
        )  # fmt: skip
        self._distrusted.add(message.source)
        if not await self._answers(message.source):
            self._drop([message.source])
        await self._replan(f"{message.source} did not deliver block {message.block}")

    async def _on_gone(self, node: NodeId) -> None:
        if node in self._held:
            self._drop([node])
            await self._replan(f"node {node} is gone")

    async def _answers(self, node: NodeId) -> bool:
        try:
            await self._bus.request(subjects.node_ping(node), Ping(), Ok, timeout=PING_TIMEOUT_S)
        except BusError:
            return False
        return True

    def _drop(self, nodes: Iterable[NodeId]) -> None:
        for node in nodes:
            self._held.pop(node, None)
            self._promoting.discard(node)
            if node in self.record.targets:
                targets = tuple(n for n in self.record.targets if n != node)
                self._set(msgspec.structs.replace(self.record, targets=targets))
                self._hooks.dropped(node)

    async def _replan(self, why: str) -> None:
        """The next revision, from what every participant holds now."""
        if not self.record.targets:
            raise PlanError(f"no target is left ({why})")
        loading = self._incomplete()
        receiving = [node for node in loading if node not in self._promoting]
        self._log.info("re-planning", why=why, revision=self.record.revision + 1)
        with telemetry.span("replan", parent=self.record.trace, attributes={"why": why}):
            transfers = self._repaired(receiving)
        self._set(events.replan(self.record, self.record.targets, transfers))
        await self._send(loading)

    def _repaired(self, receiving: list[NodeId]) -> tuple[Transfer, ...]:
        blocks = self._model.n_blocks
        every = frozenset(range(blocks))
        held = {
            node: every if node in self._promoting else frozenset(blocks_held)
            for node, blocks_held in self._held.items()
        }
        for node, now_held in self._cluster.holders(self._model.model_id, IN_MEMORY).items():
            if node not in held:
                held[node] = now_held
        senders = {n for n in held if n not in self._distrusted}
        try:
            return repair_transfers(held, receiving, blocks, senders)
        except PlanError:
            return repair_transfers(held, receiving, blocks, set(held))

    # --- the record ---

    def _set(self, record: EventRecord) -> None:
        changed = record.state is not self.record.state or record.revision != self.record.revision
        self.record = record
        if changed:
            self._hooks.changed(record)

    def _advance(self, state: EventState, timing: str) -> None:
        at = wall_ns()
        self._set(events.advance(events.note(self.record, at, timing), state, at))

    def _fail(self, error: str) -> None:
        lost = self._incomplete_or_all()
        self._set(events.advance(self.record, EventState.FAILED, wall_ns(), error=error))
        for node in lost:
            self._hooks.dropped(node)

    def _incomplete_or_all(self) -> list[NodeId]:
        return [
            node
            for node in self.record.targets
            if len(self._held.get(node, ())) < self._model.n_blocks
        ]

    def _summary(self) -> dict[str, telemetry.Attribute]:
        actual = {
            f"actual.{name}": value
            for name, value in msgspec.structs.asdict(self.record.actual).items()
            if value is not None
        }
        predicted = {
            f"predicted.{name}": value
            for name, value in msgspec.structs.asdict(self.record.predicted).items()
            if value is not None
        }
        return {
            "event": self.record.id,
            "model": self.record.name,
            "state": self.record.state.value,
            "cause": self.record.cause,
            "revision": self.record.revision,
            "bytes_moved": self.record.bytes_moved,
            **actual,
            **predicted,
        }

    async def _ask(self, subject: str, message: Message, reply: type[M]) -> M:
        return await self._bus.request(subject, message, reply, timeout=REQUEST_TIMEOUT_S)

    async def _unreserve(self) -> None:
        try:
            await self._ask(subjects.REGISTRY_UNRESERVE, Unreserve(event=self.record.id), Ok)
        except BusError as error:
            self._log.warning("unreserve failed; the registry will drop it", error=str(error))
