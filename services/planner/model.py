"""One model's controller: wants replicas, runs its scaling event, publishes its instances."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from structlog.stdlib import BoundLogger

from services.planner.core import instances
from services.planner.core.cluster import Cluster
from services.planner.core.scaling import Decision, Policy, Scaler, decide
from services.planner.event_run import IN_MEMORY, EventRun, Hooks
from shared import subjects, telemetry
from shared.bus.base import Bus
from shared.clock import now, wall_ns
from shared.config import PlannerConfig
from shared.errors import BusError, Conflict, LambdaScaleError
from shared.ids import EventId, Generation, InstanceId, NodeId, new_id
from shared.messages import Message, Ok
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.pool import ModelRecord, NodeGone, Tier
from shared.messages.scaling import (
    EventRecord,
    EventState,
    FirstPartialToken,
    ReleaseModel,
    Timings,
)

REPUBLISH_S = 1.0
RETRY_S = 1.0
"""After an event that failed, before the next one."""
SETTLE_S = 0.35
"""Load reports older than this may not yet know of a change that was published."""
MOVE_LIMIT_S = 10.0
DRAIN_LIMIT_S = 60.0
RELEASE_TIMEOUT_S = 10.0
HOP_COST = 0.02
"""What a path pays for one more stage, as a share of a pass through the model."""

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class Context:
    """What all controllers of a planner share."""

    bus: Bus
    cluster: Cluster
    config: PlannerConfig
    log: BoundLogger
    epoch: int
    spawn: Spawn
    changed: Callable[[EventRecord], None]


class ModelController:
    def __init__(self, context: Context, record: ModelRecord) -> None:
        self.record = record
        self.fixed: int | None = None
        self.instances: tuple[Instance, ...] = ()
        self.event: EventRun | None = None
        self._context = context
        self._log = context.log.bind(model=record.name)
        self._members: dict[NodeId, instances.Member] = {}
        self._scaler = Scaler()
        self._revision = 0
        self._published_at = float("-inf")
        self._retired_at: dict[InstanceId, float] = {}
        self._retry_at = float("-inf")
        self._trace = ""
        self._dirty = True
        self._removed = False
        self._adopt()

    def _adopt(self) -> None:
        """Members after a planner's restart: whoever says that it can execute blocks."""
        holders = self._context.cluster.holders(self.record.model_id, [Tier.GPU])
        for node, held in holders.items():
            self._join(node, held, event=None)

    # --- what happens to it ---

    def on_status(self, node: NodeId) -> None:
        """A node said what it holds: blocks of a member count, a lone complete copy is adopted."""
        held = self._context.cluster.held(node, self.record.model_id, [Tier.GPU])
        member = self._members.get(node)
        if member is not None and not held <= member.held:
            self._members[node] = replace(member, held=member.held | held)
            self._dirty = True
        elif member is None and not self._members and not self._busy_event():
            self._adopt()

    def on_gone(self, message: NodeGone) -> None:
        if self._members.pop(message.node, None) is not None:
            self._dirty = True
        if self.event is not None:
            self.event.tell(message)
        self.tick()

    def on_suspect(self, node: NodeId) -> None:
        """A node that does not answer: no instance may use it, whatever its lease says."""
        member = self._members.get(node)
        if member is not None:
            self.on_gone(NodeGone(node=node, generation=self._generation(node), reason="suspect"))

    def tell_event(self, message: Message) -> None:
        run = self.event
        if run is None:
            return
        if isinstance(message, FirstPartialToken) and message.event == run.record.id and run.over:
            run.on_partial_token(message)
        elif getattr(message, "event", None) == run.record.id:
            run.tell(message)

    def remove(self) -> None:
        """The model is no more: nothing serves it from now on."""
        self._removed = True
        self.instances = ()
        self._publish()

    def set_fixed(self, count: int | None) -> EventId | None:
        """The operator's number of replicas; returns the event that this begins, if any."""
        if self._busy_event():
            raise Conflict(f"a scaling event of {self.record.name} is running: wait for its end")
        before = self.event
        self.fixed = count
        self._retry_at = float("-inf")
        self.tick()
        return self.event.record.id if self.event is not None and self.event is not before else None

    # --- the tick ---

    def tick(self) -> None:
        if self._removed:
            return
        at = now()
        self._decide(at)
        self._revise(at)
        if self._dirty or at - self._published_at >= REPUBLISH_S:
            self._publish()

    def _decide(self, at: float) -> None:
        blocks = self.record.n_blocks
        serving = [m for m in self._members.values() if len(m.held) == blocks and not m.draining]
        coming = sum(len(m.held) < blocks for m in self._members.values())
        demand = self._context.cluster.demand(self.record.name, at)
        self._scaler, decision = decide(
            self._scaler, demand, self._policy(), have=len(serving), coming=coming, now=at
        )
        missing = decision.replicas - len(serving) - coming
        if missing > 0:
            self._grow(decision, missing, at)
        elif decision.replicas < len(serving) and not self._busy_event():
            self._shrink(serving, at)

    def _policy(self) -> Policy:
        nodes = self._context.cluster.nodes.values()
        config = self._context.config
        return Policy(
            min_instances=min(self.record.min_instances, len(nodes)),
            max_instances=min(self.record.max_instances or len(nodes), len(nodes)),
            slots=max((info.slots for info in nodes), default=1),
            kv_tokens=max((info.kv_tokens for info in nodes), default=1),
            queue_per_instance=config.queue_per_instance,
            scale_up_hold_s=config.scale_up_hold_s,
            idle_s=config.idle_s,
            fixed=self.fixed,
        )

    def _busy_event(self) -> bool:
        return self.event is not None and not self.event.over

    # --- more ---

    def _grow(self, decision: Decision, missing: int, at: float) -> None:
        for node, member in self._members.items():
            if member.draining and missing > 0:  # the cheapest capacity there is
                self._members[node] = replace(member, draining=False)
                self._dirty = True
                missing -= 1
        if missing == 0 or self._busy_event() or at < self._retry_at:
            return
        detected_ns = wall_ns() - int((at - decision.detected_at) * 1e9)
        self.event = self._new_event(decision, detected_ns)
        self._trace = self.event.record.trace
        exclude = tuple(self._members)
        self._context.spawn(self._run_event(self.event, missing, exclude), "event")

    def _new_event(self, decision: Decision, detected_ns: int) -> EventRun:
        root = telemetry.start("scale_event", start_ns=detected_ns)
        trace = telemetry.traceparent(root)
        decided_ns = wall_ns()
        telemetry.record("detect", start_ns=detected_ns, end_ns=decided_ns, parent=trace)
        telemetry.record(
            "decide",
            start_ns=decided_ns,
            end_ns=wall_ns(),
            parent=trace,
            attributes={"cause": decision.cause, "replicas": decision.replicas},
        )
        record = EventRecord(
            id=EventId(new_id("ev")),
            name=self.record.name,
            model_id=self.record.model_id,
            state=EventState.DECIDED,
            cause=decision.cause,
            revision=0,
            sources=(),
            targets=(),
            strategy=self._context.config.strategy,
            transfers=(),
            n_blocks=self.record.n_blocks,
            nbytes=self.record.nbytes,
            detected_ns=detected_ns,
            decided_ns=decided_ns,
            history=((EventState.DECIDED, decided_ns),),
            predicted=Timings(),
            actual=Timings(),
            physical_limit_s=None,
            bytes_moved=0,
            trace=trace,
        )
        hooks = Hooks(self._context.changed, self._on_target, self._on_block, self._on_dropped)
        self._context.changed(record)
        return EventRun(
            self._context.bus,
            self._context.cluster,
            self._context.config,
            self.record,
            record,
            root,
            self._context.log,
            hooks,
        )

    async def _run_event(self, run: EventRun, count: int, exclude: tuple[NodeId, ...]) -> None:
        await run.run(count, exclude)
        if run.record.state is not EventState.COMPLETE:
            self._retry_at = now() + RETRY_S
        self._dirty = True
        self.tick()

    def _on_target(self, node: NodeId) -> None:
        held = self._context.cluster.held(node, self.record.model_id, [Tier.GPU])
        self._join(node, held, event=self.event.record.id if self.event else None)

    def _on_block(self, node: NodeId, block: int) -> None:
        member = self._members.get(node)
        if member is not None:
            self._members[node] = replace(member, held=member.held | {block})
            self._dirty = True
            self._revise(now())
            self._publish()

    def _on_dropped(self, node: NodeId) -> None:
        if self._members.pop(node, None) is not None:
            self._dirty = True
            if node in self._context.cluster.nodes:
                self._context.spawn(self._release(node, keep=None), f"release {node}")

    def _join(self, node: NodeId, held: frozenset[int], event: EventId | None) -> None:
        info = self._context.cluster.nodes[node]
        self._members[node] = instances.Member(
            node=node, address=info.address, slots=info.slots, held=held, event=event
        )
        self._dirty = True

    # --- less ---

    def _shrink(self, serving: list[instances.Member], at: float) -> None:
        """Drains the emptiest replica; among equals the one that came last."""

        def load(member: instances.Member) -> int:
            replica = InstanceId(f"replica-{member.node}")
            return self._context.cluster.requests_on(self.record.name, replica, at)

        victim = min(reversed(serving), key=load)
        self._members[victim.node] = replace(victim, draining=True)
        self._dirty = True
        self._context.spawn(self._drain(victim.node), f"drain {victim.node}")

    async def _drain(self, node: NodeId) -> None:
        started, started_ns = now(), wall_ns()
        replica = InstanceId(f"replica-{node}")
        while now() - started < DRAIN_LIMIT_S:
            await asyncio.sleep(self._context.config.tick_s)
            member = self._members.get(node)
            if member is None or not member.draining:
                return  # gone, or needed again
            if now() - started > SETTLE_S and not self._busy(replica):
                break
        member = self._members.pop(node)
        self._dirty = True
        self.tick()
        kept = self._keep(node)
        await self._release(node, keep=kept)
        telemetry.record(
            "drain",
            start_ns=started_ns,
            end_ns=wall_ns(),
            parent=self._trace,
            attributes={
                "node": node,
                "model": self.record.name,
                "keep": kept.value if kept else "",
            },
        )

    def _keep(self, leaving: NodeId) -> Tier | None:
        """The pool's invariant: the last copy in memory stays, in the host's."""
        holders = self._context.cluster.holders(self.record.model_id, IN_MEMORY)
        copies = [
            node
            for node, held in holders.items()
            if node != leaving
            and len(held) == self.record.n_blocks
            and (node not in self._members or not self._members[node].draining)
        ]
        return None if copies else Tier.HOST

    async def _release(self, node: NodeId, keep: Tier | None) -> None:
        release = ReleaseModel(
            node=node,
            generation=self._generation(node),
            model_id=self.record.model_id,
            keep=keep,
            trace=self._trace,
        )
        try:
            await self._context.bus.request(
                subjects.node_release(node), release, Ok, timeout=RELEASE_TIMEOUT_S
            )
        except LambdaScaleError as error:
            self._log.warning("release failed", node=node, code=error.code, error=str(error))

    # --- the instance set ---

    def _revise(self, at: float) -> None:
        config = self._context.config
        before = self.instances
        self.instances = self._expire(
            instances.revise(
                before,
                self._members,
                instances.Limits(self.record.n_blocks, config.max_stages, HOP_COST),
                busy=self._busy,
                new_id=new_id,
                event=self.event.record.id if self.event else None,
            ),
            at,
        )
        if self.instances == before:
            return
        self._dirty = True
        known = {instance.id for instance in before}
        for instance in self.instances:
            if not instance.is_replica and instance.id not in known:
                self._on_new_path(instance)

    def _on_new_path(self, path: Instance) -> None:
        at = wall_ns()
        telemetry.record(
            "path_formed",
            start_ns=at,
            end_ns=at,
            parent=self._trace,
            attributes={
                "instance": path.id,
                "stages": " ".join(f"{s.node}[{s.start}:{s.stop}]" for s in path.stages),
                "capacity": path.capacity,
            },
        )
        if self.event is not None:
            self.event.on_path()

    def _expire(self, candidates: tuple[Instance, ...], at: float) -> tuple[Instance, ...]:
        """Paths that are no longer wanted leave once empty, or after a limit."""
        retired = {i.id: i for i in candidates if i.state is not InstanceState.SERVING}
        self._retired_at = {id_: self._retired_at.get(id_, at) for id_ in retired}
        return tuple(
            instance
            for instance in candidates
            if instance.state is not InstanceState.MOVING
            or at - self._retired_at[instance.id] < MOVE_LIMIT_S
        )

    def _busy(self, instance: InstanceId) -> bool:
        at = now()
        recent = at - self._retired_at.get(instance, at) < SETTLE_S
        return recent or self._context.cluster.requests_on(self.record.name, instance, at) > 0

    def instance_set(self) -> InstanceSet:
        return InstanceSet(
            name=self.record.name,
            model_id=self.record.model_id,
            epoch=self._context.epoch,
            revision=self._revision,
            instances=self.instances,
            trace=self._trace,
        )

    def _publish(self) -> None:
        if self._dirty:
            self._revision += 1
        self._dirty = False
        self._published_at = now()
        self._context.spawn(self._send_set(self.instance_set()), "publish")

    async def _send_set(self, message: InstanceSet) -> None:
        try:
            await self._context.bus.publish(subjects.INSTANCES, message)
        except BusError as error:
            self._dirty = True
            self._log.warning("instances not published", error=str(error))

    def _generation(self, node: NodeId) -> Generation:
        info = self._context.cluster.nodes.get(node)
        return info.generation if info is not None else Generation(0)
