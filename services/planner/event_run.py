"""Carries one scaling event from its decision to its end: the shell around `core/events`."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import Span

from services.planner.context import Context
from services.planner.core import events
from services.planner.core.forecast import later
from services.planner.core.placement import Plan, Roles, assign_roles
from services.planner.orders import Orders
from services.planner.planning import Planning
from services.planner.registry import Registry
from services.planner.store import fitting
from services.planner.trust import Trust
from shared import subjects, telemetry
from shared.clock import now, wall_ns
from shared.errors import CapacityExceeded, LambdaScaleError, PlanError
from shared.ids import NodeId
from shared.messages import Message
from shared.messages.pool import ModelRecord, NodeGone, NodeInfo, Tier
from shared.messages.scaling import (
    BlockArrived,
    EventChanged,
    EventRecord,
    EventState,
    FirstPartialToken,
    PullFailed,
    Transfer,
)

CHECK_S = 1.0
"""After so long without news the nodes' own reports are looked at: news can get lost."""
STALL_S = 5.0
STALL_BYTES_PER_S = 20_000_000
"""No block for STALL_S and the time of one block at this rate: plan again from what is held."""
MAX_STALLS = 3
MAX_REVISIONS = 32
IN_MEMORY = (Tier.GPU, Tier.HOST)


@dataclass(frozen=True, slots=True)
class Hooks:
    """How a run tells its model's controller what happened."""

    joined: Callable[[NodeInfo, frozenset[int]], None]
    """A node is a target now, and holds these blocks."""
    arrived: Callable[[NodeId, int], None]
    dropped: Callable[[NodeId], None]
    """A node is no target any more, which is its own fault."""
    freed: Callable[[NodeId], None]
    """The event ended before the node, a target, was complete: what it holds may be freed."""
    leaving: Callable[[NodeId], bool]
    """What the node holds is about to go."""


class EventRun:
    def __init__(
        self, context: Context, model: ModelRecord, record: EventRecord, root: Span, hooks: Hooks
    ) -> None:
        self.record = record
        self.no_room = False
        """It failed because no target was to be had."""
        self._context = context
        self._cluster = context.cluster
        self._model = model
        self._every = frozenset(range(model.n_blocks))
        self._root = root
        self._log = context.log.bind(event_id=record.id, model=record.name)
        self._hooks = hooks
        self._registry = Registry(context)
        self._orders = Orders(context)
        self._planning = Planning(context, model)
        self._held: dict[NodeId, set[int]] = {}
        """Blocks that each target can execute so far."""
        self._pulled: set[tuple[NodeId, int]] = set()
        self._promoting: set[NodeId] = set()
        self._trust = Trust(context)
        self._out: set[NodeId] = set()
        """Nodes that the event goes on without: gone, silent, or unable."""
        self._troubles: list[PullFailed | NodeGone] = []
        self._news = asyncio.Event()
        self._news_at = 0.0
        self._announce()

    # --- what the controller says ---

    @property
    def over(self) -> bool:
        return self.record.state in events.TERMINAL

    def loads(self, node: NodeId) -> bool:
        """Whether the event, not over yet, has the node for a target."""
        return not self.over and node in self.record.targets

    def tell(self, message: Message) -> None:
        """Anything that may concern this event."""
        if isinstance(message, BlockArrived):
            self._on_arrived(message)
        elif isinstance(message, FirstPartialToken):
            if message.stages > 1:
                self._note(message.at_ns, "first_partial_token_s")
        elif isinstance(message, PullFailed | NodeGone):
            self._troubles.append(message)
            self._news.set()

    def on_path(self) -> None:
        """The first path over nodes that are still loading is open."""
        if self.over:
            return
        self._note(wall_ns(), "first_path_s")
        if self.record.state is EventState.TRANSFERRING:
            self._set(events.advance(self.record, EventState.SERVING, wall_ns()))

    def cancel(self, reason: str) -> None:
        """Ends the event as it is. The task of `run` is the caller's to cancel."""
        if not self.over:
            self._finish(EventState.CANCELLED, reason)

    # --- from the decision to the first bytes ---

    async def run(self, count: int, exclude: Iterable[NodeId]) -> None:
        """Reserves up to `count` targets, moves the model to them, ends in a terminal state."""
        try:
            await self._begin(count, tuple(exclude))
            await self._watch()
            self._finish(EventState.COMPLETE)
        except LambdaScaleError as error:
            self.no_room = isinstance(error, CapacityExceeded)
            self._finish(EventState.FAILED, str(error))
        finally:
            self.cancel("the planner stopped")
            await self._registry.unreserve(self.record.id)

    async def _begin(self, count: int, exclude: tuple[NodeId, ...]) -> None:
        with telemetry.span("plan", parent=self.record.trace) as span:
            parent = telemetry.traceparent(span)
            with telemetry.span("reserve", parent=parent):
                infos, sources = await asyncio.gather(
                    self._registry.reserve(self.record.id, self._model, count, exclude),
                    self._registry.sources(self._model),
                )
            if not infos:
                raise CapacityExceeded("no node has room for another replica")
            staying = [s for s in sources if not self._hooks.leaving(s.info.node)]
            roles = assign_roles(staying, [info.node for info in infos])
            with telemetry.span("choose", parent=parent):
                plan = await self._plan(roles)
            span.set_attributes(
                {
                    "sources": ",".join(roles.sources),
                    "targets": ",".join(self.record.targets),
                    "strategy": self.record.strategy,
                    "transfers": len(self.record.transfers),
                    "considered": "; ".join(map(str, plan.considered)),
                }
            )
        self._set(events.advance(self.record, EventState.TRANSFERRING, wall_ns()))
        for info in infos:
            self._hooks.joined(info, frozenset(self._held[info.node]))
        await asyncio.sleep(plan.setup_s)
        await self._send(self.record.targets)

    async def _plan(self, roles: Roles) -> Plan:
        targets = (*roles.promoting, *roles.receiving)
        held = {node: self._executable(node) for node in targets}
        self._held = {node: set(blocks) for node, blocks in held.items()}
        running = {*targets, *(n for n in roles.sources if self._executable(n))}
        plan = await self._planning.plan(roles, held, running)
        self._promoting = {*roles.promoting, *plan.loading}
        since_decision_s = (wall_ns() - self.record.decided_ns) / 1e9
        record = msgspec.structs.replace(
            self.record,
            sources=roles.sources,
            targets=targets,
            strategy=plan.strategy,
            transfers=plan.transfers,
            predicted=later(plan.forecast.predicted, since_decision_s),
            physical_limit_s=plan.forecast.physical_limit_s,
        )
        self._set(events.advance(record, EventState.PLANNED, wall_ns()))
        return plan

    def _executable(self, node: NodeId) -> frozenset[int]:
        return self._cluster.held(node, self._model.model_id, [Tier.GPU]) & self._every

    # --- until everything has arrived ---

    def _incomplete(self) -> list[NodeId]:
        return [n for n in self.record.targets if len(self._held[n]) < self._model.n_blocks]

    async def _watch(self) -> None:
        stalls = 0
        self._news_at = now()
        patience = STALL_S + max(self._model.block_bytes) / STALL_BYTES_PER_S
        while self._incomplete():
            if self._troubles:
                await self._mend()
                continue
            await self._look_for_slow_nodes()
            if await self._something_came() or self._take_reports():
                stalls = 0
            elif self._cluster.blind(now()):
                self._news_at = now()  # cut off from the bus: silence says nothing
            elif now() - self._news_at >= patience:
                stalls += 1
                waiting = ", ".join(self._incomplete())
                if stalls > MAX_STALLS:
                    raise PlanError(f"no block arrived for {stalls} x {patience:.0f} s: {waiting}")
                self._drop(await self._trust.not_answering(self._participants()))
                await self._replan(f"no block arrived for {patience:.0f} s: {waiting}")
                self._news_at = now()

    async def _something_came(self) -> bool:
        self._news.clear()
        try:
            async with asyncio.timeout(CHECK_S):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _take_reports(self) -> bool:
        """Blocks whose arrival was not heard of; whether there are any."""
        found = False
        for node in self._incomplete():
            for block in self._executable(node) - self._held[node]:
                found = True
                self._take(node, block, wall_ns())
        return found

    def _on_arrived(self, message: BlockArrived) -> None:
        info = self._cluster.nodes.get(message.node)
        if not self.loads(message.node) or (info and info.generation != message.generation):
            return
        arrival = (message.node, message.block)
        if message.source != message.node and arrival not in self._pulled:
            self._pulled.add(arrival)
            moved = self.record.bytes_moved + message.nbytes
            self.record = msgspec.structs.replace(self.record, bytes_moved=moved)
        self._note(message.first_byte_ns, "first_byte_s")
        self._take(message.node, message.block, message.finished_ns)

    def _take(self, node: NodeId, block: int, at_ns: int) -> None:
        if block in self._every and block not in self._held[node]:
            self._held[node].add(block)
            self._trust.land(node, block)
            if len(self._held[node]) == self._model.n_blocks:
                self._note(at_ns, "first_complete_s")
            self._hooks.arrived(node, block)
            self._news_at = now()
            self._news.set()

    # --- when something goes wrong ---

    async def _mend(self) -> None:
        """Takes in all the troubles that have come, and answers them with one new revision."""
        troubles, self._troubles = self._troubles, []
        gone = {t.node for t in troubles if isinstance(t, NodeGone)}
        failures = [
            t
            for t in troubles
            if isinstance(t, PullFailed)
            and self.loads(t.node)
            and self._orders.sent.get(t.node) == t.revision  # others have been answered
        ]
        for failure in failures:
            self._log.warning(
                "pull failed",
                node=failure.node,
                source=failure.source,
                block=failure.block,
                code=failure.code,
            )
        whys = [f"node {node} is gone" for node in sorted(gone & self._participants())]
        whys += [f"{f.node} did not get block {f.block} from {f.source}" for f in failures]
        if not whys:
            self._out |= gone
            return
        self._promoting -= {f.node for f in failures if f.source == f.node}
        unable = await self._trust.blame(failures)
        self._drop(gone | unable)
        await self._replan("; ".join(dict.fromkeys(whys)))

    async def _look_for_slow_nodes(self) -> None:
        """A node that is found slow is relieved of what others can send."""
        slow = self._trust.slow(self.record.transfers, self._held, self._planning.expected)
        if not slow:
            return
        why = "; ".join(f"node {node} is slow: {late}" for node, late in slow.items())
        try:
            transfers = await self._repaired(self._receiving(), why)
        except PlanError:
            return  # all of what is left must come from those that send it now
        if sum(t.src in slow for t in transfers) < self._sends_of(slow):
            await self._replan(why)

    def _sends_of(self, nodes: Collection[NodeId]) -> int:
        """Transfers from these nodes that are still to come."""
        every = self._every
        return sum(
            t.src in nodes and t.block not in self._held.get(t.dst, every)
            for t in self.record.transfers
        )

    def _receiving(self) -> list[NodeId]:
        return [node for node in self._incomplete() if node not in self._promoting]

    def _participants(self) -> set[NodeId]:
        """Targets, and the senders of what is still to come."""
        done, transfers = self._every, self.record.transfers
        senders = {t.src for t in transfers if t.block not in self._held.get(t.dst, done)}
        return {*self.record.targets, *senders}

    def _drop(self, nodes: Iterable[NodeId]) -> None:
        for node in sorted(nodes):
            self._out.add(node)
            self._promoting.discard(node)
            if self._held.pop(node, None) is not None:
                targets = tuple(n for n in self.record.targets if n != node)
                self.record = msgspec.structs.replace(self.record, targets=targets)
                self._hooks.dropped(node)

    async def _send(self, targets: Collection[NodeId]) -> None:
        """Gives targets their parts; goes on without those that do not take them."""
        self._trust.begin()
        refused = await self._orders.send(self.record, targets, self._to_promote)
        for node, error in refused.items():
            self._log.warning("target refused its plan", node=node, error=str(error))
        if refused:
            self._drop(refused)
            whys = "; ".join(f"{node}: {error}" for node, error in refused.items())
            await self._replan(f"targets refused: {whys}")

    def _to_promote(self, node: NodeId) -> tuple[int, ...]:
        return tuple(sorted(self._every - self._held[node])) if node in self._promoting else ()

    async def _replan(self, why: str) -> None:
        """The next revision, from what every participant holds now."""
        if not self.record.targets:
            raise PlanError(f"no target is left: {why}")
        receiving = self._receiving()
        if not receiving:
            return
        if self.record.revision >= MAX_REVISIONS:
            raise PlanError(f"given up after {MAX_REVISIONS} plans: {why}")
        self._log.info("re-planning", why=why, revision=self.record.revision + 1)
        with telemetry.span("replan", parent=self.record.trace, attributes={"why": why}):
            transfers = await self._repaired(receiving, why)
        self._set(events.replan(self.record, self.record.targets, transfers))
        await self._send(receiving)

    async def _repaired(self, receiving: list[NodeId], why: str) -> tuple[Transfer, ...]:
        held = {
            node: self._every if node in self._promoting else frozenset(blocks)
            for node, blocks in self._held.items()
        }
        for node, blocks in self._cluster.holders(self._model.model_id, IN_MEMORY).items():
            if node not in held and node not in self._out and not self._hooks.leaving(node):
                held[node] = blocks & self._every
        try:
            return await self._planning.repair(held, receiving, frozenset(self._trust.distrusted))
        except PlanError as error:
            raise PlanError(f"{why}, and {error}") from error

    # --- the record ---

    def _note(self, at_ns: int, timing: str) -> None:
        before = self.record
        self.record = events.note(before, at_ns, timing)
        if self.over and self.record.actual != before.actual:
            self._context.store.put(self.record)

    def _set(self, record: EventRecord) -> None:
        """A change that observers and the store are told of."""
        self.record = record
        self._announce()

    def _announce(self) -> None:
        self._context.store.put(self.record)
        (record,) = fitting([self.record])
        self._context.publish(subjects.EVENTS, EventChanged(record=record, trace=record.trace))

    def _finish(self, state: EventState, error: str = "") -> None:
        at = wall_ns()
        lost = self._incomplete()
        if state is EventState.COMPLETE:
            self._note(at, "all_complete_s")
        self._set(events.advance(self.record, state, at, error=error))
        self._root.set_attributes(events.summary(self.record))
        self._root.end(end_time=at)
        if error:
            self._log.warning("event ended early", state=state.value, error=error)
        else:
            self._log.info("event complete", seconds=self.record.actual.all_complete_s)
        if state is EventState.FAILED:
            for node in lost:
                self._hooks.freed(node)
