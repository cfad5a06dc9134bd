"""One model's controller: decides how many replicas, runs scaling events, drains and releases."""

import asyncio

from services.planner.context import Context
from services.planner.core.instances import Member
from services.planner.core.multicast.strategies import LOCAL
from services.planner.core.scaling import Decision, Policy, Scaler, decide
from services.planner.event_run import IN_MEMORY, EventRun, Hooks
from services.planner.serving import Cause, Serving
from shared import subjects, telemetry
from shared.clock import now, wall_ns
from shared.errors import BadInput, Conflict, LambdaScaleError, StaleEpoch
from shared.ids import EventId, NodeId, new_id
from shared.messages import Message, Ok
from shared.messages.instances import Instance
from shared.messages.pool import Holding, ModelRecord, NodeGone, NodeInfo, Tier
from shared.messages.scaling import EventRecord, EventState, ReleaseModel, Timings

RETRY_S = 1.0
"""After an event that failed, before the next one; doubles with each one that follows."""
RETRY_MAX_S = 30.0
AVOID_S = 10.0
"""How long a node that failed an event, or did not answer, is no target."""
DRAIN_LIMIT_S = 60.0
RELEASE_TIMEOUT_S = 10.0
RELEASE_RETRY_S = 0.5
RELEASE_WAIT_S = 1.0
"""How long a new event waits for memory that is being released; then it does without."""


class Leaving:
    """A node that was asked to release the model."""

    def __init__(self) -> None:
        self.since = now()
        self.answered = False


class ModelController:
    def __init__(self, context: Context, record: ModelRecord) -> None:
        self.record = record
        self.event: EventRun | None = None
        self.serving = Serving(context, record, self._on_path)
        self._context = context
        self._log = context.log.bind(model=record.name)
        self._scaler = Scaler()
        self._leaving: dict[NodeId, Leaving] = {}
        self._avoid: dict[NodeId, float] = {}
        """Until when."""
        self._failed = 0
        """Events in a row."""
        self._retry_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._removed = False
        for node in context.cluster.holders(record.model_id, [Tier.GPU]):
            self.on_status(node)

    @property
    def fixed(self) -> int | None:
        """The operator's number of replicas."""
        return self._context.store.fixed.get(self.record.model_id)

    # --- what happens to it ---

    def on_status(self, node: NodeId) -> None:
        """A node said what it holds."""
        cluster, model = self._context.cluster, self.record.model_id
        held = cluster.held(node, model, [Tier.GPU])
        self._note_released(node)
        if node in self._leaving:
            return
        member = self.serving.members.get(node)
        if member is not None:
            self.serving.grow(node, held)
            if not member.held <= held and not self._loads(node) and self.serving.stable(node):
                self._log.warning("a member lost blocks", node=node)
                self.serving.leave(node)
        elif len(held) == self.record.n_blocks:
            self._log.info("complete copy found", node=node)
            self._context.watch(node, model)
            self.serving.join(cluster.nodes[node], held, Cause())

    def uses(self, node: NodeId) -> bool:
        """Whether what the node holds of the model concerns it, even if that is nothing."""
        return node in self.serving.members or node in self._leaving

    def on_joined(self) -> None:
        """A new node may be what the last event lacked."""
        self._retry_at, self._failed = float("-inf"), 0

    def on_more_room(self) -> None:
        """Memory was freed, or another event ended."""
        if self.event is not None and self.event.no_room:
            self.on_joined()

    def on_gone(self, message: NodeGone) -> None:
        self.serving.leave(message.node)
        self._leaving.pop(message.node, None)
        self._avoid.pop(message.node, None)
        if self.event is not None:
            self.event.tell(message)
        self.tick()

    def on_suspect(self, node: NodeId) -> None:
        """A node that does not answer: nothing may use it, whatever its lease says."""
        info = self._context.cluster.nodes.get(node)
        if info is None:
            return
        self.on_gone(NodeGone(node=node, generation=info.generation, reason="it does not answer"))
        self._avoid[node] = now() + AVOID_S

    def tell_event(self, message: Message) -> None:
        event = getattr(message, "event", None)
        if self.event is not None and self.event.record.id == event:
            self.event.tell(message)

    def owns(self, node: NodeId, holding: Holding) -> bool:
        """Whether what a node holds of the model in memory is there for a reason."""
        if self.uses(node) or self._loads(node):
            return True
        whole = len(holding.blocks) == self.record.n_blocks
        return holding.tier is Tier.HOST and whole and self._keep(node) is Tier.HOST

    def remove(self) -> None:
        """The model is no more: nothing serves it from now on. Nodes forget it by themselves."""
        self._removed = True
        if self.event is not None and self._task is not None:
            self.event.cancel("the model was removed")
            self._task.cancel()
        self.serving.close()
        self._context.store.fix(self.record.model_id, None)

    def set_fixed(self, count: int | None) -> EventId | None:
        """The operator's number of replicas; returns the event that this begins, if any."""
        limit = self.record.max_instances
        if count is not None and limit and count > limit:
            raise BadInput(f"{count} instances asked for, max_instances of the model is {limit}")
        if self._scaling():
            raise Conflict(f"a scaling event of {self.record.name} is running: wait for its end")
        before = self.event
        self._context.store.fix(self.record.model_id, count)
        self.on_joined()
        self.tick()
        return self.event.record.id if self.event is not None and self.event is not before else None

    def _scaling(self) -> bool:
        return self.event is not None and not self.event.over

    def _loads(self, node: NodeId) -> bool:
        return self.event is not None and self.event.loads(node)

    # --- the tick ---

    def tick(self) -> None:
        if self._removed:
            return
        at = now()
        if not self._context.cluster.blind(at):
            self._decide(at)
        self.serving.refresh()

    def _decide(self, at: float) -> None:
        have = len(self.serving.replicas)
        draining = sum(m.draining for m in self.serving.members.values())
        coming = len(self.serving.members) - have - draining
        self._scaler, decision = decide(
            self._scaler,
            self._context.cluster.demand(self.record.name),
            self._policy(),
            have=have,
            coming=coming,
            leaving=draining + len(self._leaving),
            now=at,
        )
        missing = decision.replicas - have - coming
        if missing > 0:
            self._grow(decision, missing, at)
        elif decision.replicas < have and not self._scaling():
            self._shrink()

    def _policy(self) -> Policy:
        cluster, config = self._context.cluster, self._context.config
        nodes = len(cluster.nodes)
        return Policy(
            min_instances=self.record.min_instances,
            max_instances=min(self.record.max_instances or nodes, nodes),
            slots=cluster.slots,
            kv_tokens=cluster.kv_tokens(self.record.model_id),
            queue_per_instance=config.queue_per_instance,
            prefill_wait_s=config.prefill_wait_s,
            prefill_s_per_token=cluster.prefill_s_per_token(self.record.model_id),
            scale_up_hold_s=config.scale_up_hold_s,
            horizon_s=config.horizon_s,
            idle_s=config.idle_s,
            fixed=self.fixed,
        )

    # --- more ---

    def _grow(self, decision: Decision, missing: int, at: float) -> None:
        for node, member in list(self.serving.members.items()):
            if member.draining and missing > 0:  # the cheapest capacity there is
                self.serving.drain(node, False)
                missing -= 1
        if missing == 0 or self._scaling() or at < self._retry_at:
            return
        if any(at - leaving.since < RELEASE_WAIT_S for leaving in self._leaving.values()):
            return
        detected_ns = wall_ns() - int((at - decision.detected_at) * 1e9)
        self.event = self._new_event(decision, detected_ns)
        self.serving.cause = Cause(self.event.record.id, self.event.record.trace)
        self._avoid = {node: until for node, until in self._avoid.items() if at < until}
        exclude = {*self.serving.members, *self._leaving, *self._avoid}
        work = self._run_event(self.event, missing, tuple(exclude))
        self._task = self._context.spawn(work, f"event {self.event.record.id}")

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
        hooks = Hooks(
            joined=self._on_target,
            arrived=lambda node, block: self.serving.grow(node, frozenset({block})),
            dropped=self._on_dropped,
            freed=self._on_freed,
            leaving=lambda node: node in self._leaving,
        )
        return EventRun(self._context, self.record, record, root, hooks)

    async def _run_event(self, run: EventRun, count: int, exclude: tuple[NodeId, ...]) -> None:
        await run.run(count, exclude)
        if not run.no_room:
            self._context.more_room()  # its targets can be reserved again
        if run.record.state is EventState.COMPLETE:
            self._failed = 0
        else:
            self._retry_at = now() + min(RETRY_S * 2**self._failed, RETRY_MAX_S)
            self._failed += 1
        self.tick()

    def _on_target(self, info: NodeInfo, held: frozenset[int]) -> None:
        self._context.watch(info.node, self.record.model_id)
        self.serving.join(info, held, self.serving.cause)

    def _on_dropped(self, node: NodeId) -> None:
        self._avoid[node] = now() + AVOID_S
        self._on_freed(node)

    def _on_freed(self, node: NodeId) -> None:
        self.serving.leave(node)
        if node in self._context.cluster.nodes:
            self._give_back(node)

    def _on_path(self, path: Instance) -> None:
        if self.event is not None:
            self.event.on_path()

    # --- less ---

    def _shrink(self) -> None:
        """Drains the emptiest replica; among equals the one that came last."""

        def load(member: Member) -> int:
            return self.serving.requests_over(member.node)

        victim = min(reversed(self.serving.replicas), key=load)
        self.serving.drain(victim.node)
        self._context.spawn(self._drain(victim.node), f"drain {victim.node}")

    async def _drain(self, node: NodeId) -> None:
        started, started_ns = now(), wall_ns()
        while now() - started < DRAIN_LIMIT_S:
            await asyncio.sleep(self._context.config.tick_s)
            member = self.serving.members.get(node)
            if self._removed or member is None or not member.draining:
                return  # gone, or needed again
            if not self.serving.uses(node):
                break
        member = self.serving.leave(node)
        if member is None:
            return
        kept = self._keep(node)
        await self._release(node, kept)
        telemetry.record(
            "drain",
            start_ns=started_ns,
            end_ns=wall_ns(),
            parent=member.trace,
            attributes={
                "node": node,
                "model": self.record.name,
                "keep": kept.value if kept else "",
            },
        )

    def _give_back(self, node: NodeId) -> None:
        """Frees what a node that serves nothing holds of the model."""
        keep = self._keep(node)
        self._leaving[node] = Leaving()
        self._context.watch(node, self.record.model_id)
        self._context.spawn(self._release(node, keep), f"release {node}")

    def free_stray(self, node: NodeId) -> None:
        self._log.info("memory without use is given back", node=node)
        self._give_back(node)

    def _keep(self, node: NodeId) -> Tier | None:
        """The pool's invariant: the last copy in memory stays, in the host's. Not where every node
        loads from its own disk or cache."""
        if self._context.config.strategy == LOCAL:
            return None
        members = self.serving.members
        holders = self._context.cluster.holders(self.record.model_id, IN_MEMORY)
        for other, held in holders.items():
            staying = other not in self._leaving and not (
                other in members and members[other].draining
            )
            if other != node and staying and len(held) == self.record.n_blocks:
                return None
        return Tier.HOST

    async def _release(self, node: NodeId, keep: Tier | None) -> None:
        """Asks until the node has done it, or is gone."""
        leaving = self._leaving.setdefault(node, Leaving())
        info = self._context.cluster.nodes.get(node)
        while info is not None and self._leaving.get(node) is leaving and not self._removed:
            release = ReleaseModel(
                node=node,
                generation=info.generation,
                model_id=self.record.model_id,
                keep=keep,
                trace=self.serving.cause.trace,
            )
            try:
                await self._context.bus.request(
                    subjects.node_release(node), release, Ok, timeout=RELEASE_TIMEOUT_S
                )
                break
            except StaleEpoch:
                break  # the news that its generation is over is on its way
            except LambdaScaleError as error:
                self._log.warning("release failed", node=node, code=error.code, error=str(error))
            await asyncio.sleep(RELEASE_RETRY_S)
        leaving.answered = True
        self._note_released(node)

    def _note_released(self, node: NodeId) -> None:
        """Only the node's own report says that the memory is free: until then it is leaving."""
        leaving = self._leaving.get(node)
        hosts = self._context.cluster.hosts(node, self.record.model_id)
        if leaving is not None and leaving.answered and not hosts:
            del self._leaving[node]
