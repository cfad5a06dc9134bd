"""What serves a model: its members, the instances over them, and telling the gateways."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from services.planner.context import Context
from services.planner.core import instances
from services.planner.core.instances import Member, Rules
from services.planner.core.serving.strategies import SERVING
from shared import subjects, telemetry
from shared.clock import now, wall_ns
from shared.ids import EventId, InstanceId, NodeId, new_id
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.pool import ModelRecord, NodeInfo

REPUBLISH_S = 1.0
SETTLE_S = 0.25
"""A load report that comes sooner after a change was published may not know of it yet."""
HOP_COST = 0.02
"""What a path pays for one more stage, as a share of a pass through the model."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The scaling event that changes are due to."""

    event: EventId | None = None
    trace: str = ""


class Serving:
    def __init__(
        self, context: Context, record: ModelRecord, on_path: Callable[[Instance], None]
    ) -> None:
        """`on_path`: a path over nodes that are still loading has been opened."""
        self.members: Mapping[NodeId, Member] = {}
        self.instances: tuple[Instance, ...] = ()
        self.cause = Cause()
        self._context = context
        self._record = record
        config = context.config
        strategy = SERVING[config.serving]
        self._rules = Rules(record.n_blocks, config.max_stages, HOP_COST, strategy)
        self._on_path = on_path
        self._planned: dict[instances.Stages, float] = {}
        self._outdated = asyncio.Event()
        """The members are no longer those of the plan that is being made."""
        self._planning = False
        self._grown_at: dict[NodeId, float] = {}
        self._retired: dict[InstanceId, float] = {}
        """Since when instances take no new requests."""
        self._revision = next(context.revisions)
        self._published_at = float("-inf")
        self._closed = False
        self._basis: tuple[object, ...] = ()
        """What the instances were made from; only those that retire change by themselves."""

    # --- the members ---

    @property
    def replicas(self) -> list[Member]:
        """Complete members that take requests, in the order in which they joined."""
        blocks = self._record.n_blocks
        return [m for m in self.members.values() if len(m.held) == blocks and not m.draining]

    def join(self, info: NodeInfo, held: frozenset[int], cause: Cause) -> None:
        member = Member(
            node=info.node,
            address=info.address,
            slots=info.slots,
            held=held,
            event=cause.event,
            trace=cause.trace,
        )
        self._grown_at[info.node] = now()
        self._change(instances.joined(self.members, member, self._record.n_blocks))

    def grow(self, node: NodeId, held: frozenset[int]) -> None:
        """The member holds these blocks too."""
        member = self.members.get(node)
        if member is not None and not held <= member.held:
            self._put(replace(member, held=member.held | held))

    def stable(self, node: NodeId) -> bool:
        """The member holds what it holds for long enough that older reports cannot be on their
        way."""
        return now() - self._grown_at.get(node, 0.0) >= REPUBLISH_S

    def drain(self, node: NodeId, draining: bool = True) -> None:
        self._put(replace(self.members[node], draining=draining))

    def leave(self, node: NodeId) -> Member | None:
        member = self.members.get(node)
        if member is not None:
            self._change({n: m for n, m in self.members.items() if n != node})
            self._grown_at.pop(node, None)
        return member

    def _put(self, member: Member) -> None:
        before = self.members.get(member.node)
        if before is None or before.held != member.held:
            self._grown_at[member.node] = now()
        self._change({**self.members, member.node: member})

    def _change(self, members: Mapping[NodeId, Member]) -> None:
        """Members are replaced, never changed: a plan may be looking at them in its thread."""
        if self._closed:
            return
        self.members = members
        if not instances.loading(members, self._record.n_blocks):
            self._planned = instances.plan(self.instances, members, self._rules)
        elif not self._planning:
            self._planning = True
            self._context.spawn(self._plan(), f"paths of {self._record.name}")
        self._outdated.set()
        self.refresh()

    async def _plan(self) -> None:
        """Plans paths, in a thread as it may take long, until a plan is of the members that are."""
        try:
            while self._outdated.is_set() and instances.loading(
                self.members, self._record.n_blocks
            ):
                self._outdated.clear()
                members = self.members
                planned = await asyncio.to_thread(
                    instances.plan, self.instances, members, self._rules
                )
                if instances.loading(self.members, self._record.n_blocks):
                    self._planned = planned
                    self.refresh()
        finally:
            self._planning = False

    # --- the instances ---

    def busy(self, instance: InstanceId) -> bool:
        """Whether requests run on the instance, for all that is known."""
        retired_at = self._retired.get(instance, float("inf"))
        settled = self._context.cluster.reported_since(retired_at + SETTLE_S)
        return not settled or self._requests_on(instance) > 0

    def uses(self, node: NodeId) -> bool:
        """Whether requests run over the node, on its replica or on a path, for all that is
        known."""
        return any(self.busy(instance.id) for instance in self._over(node))

    def requests_over(self, node: NodeId) -> int:
        return sum(self._requests_on(instance.id) for instance in self._over(node))

    def _over(self, node: NodeId) -> list[Instance]:
        return [i for i in self.instances if any(stage.node == node for stage in i.stages)]

    def _requests_on(self, instance: InstanceId) -> int:
        return self._context.cluster.requests_on(self._record.name, instance)

    def refresh(self) -> None:
        """Lets go of instances that are no longer used; publishes what changed, or is due."""
        if self._closed:
            return
        before = self.instances
        basis = self.members, self._planned
        if self._retired or basis != self._basis:
            self._basis = basis
            self.instances = instances.revise(
                before,
                self.members,
                self._planned,
                self._record.n_blocks,
                busy=self.busy,
                new_id=new_id,
                event=self.cause.event,
            )
            self._retired = {
                instance.id: self._retired.get(instance.id, now())
                for instance in self.instances
                if instance.state is not InstanceState.SERVING
            }
        if self.instances != before:
            self._revision = next(self._context.revisions)
            self._publish()
            self._tell_of_paths({instance.id for instance in before})
        elif now() - self._published_at >= REPUBLISH_S:
            self._publish()

    def _tell_of_paths(self, known: set[InstanceId]) -> None:
        for instance in self.instances:
            if not instance.is_replica and instance.id not in known:
                at = wall_ns()
                telemetry.record(
                    "path_formed",
                    start_ns=at,
                    end_ns=at,
                    parent=self.cause.trace,
                    attributes={
                        "instance": instance.id,
                        "stages": " ".join(
                            f"{s.node}[{s.start}:{s.stop}]" for s in instance.stages
                        ),
                        "capacity": round(instance.capacity, 3),
                    },
                )
                self._on_path(instance)

    # --- the gateways ---

    def set(self) -> InstanceSet:
        return InstanceSet(
            name=self._record.name,
            model_id=self._record.model_id,
            epoch=self._context.epoch,
            revision=self._revision,
            instances=self.instances,
            node_slots=instances.node_slots(self.instances, self.members),
            fixed=self._context.store.fixed.get(self._record.model_id),
            decode_s=self._context.cluster.decode_s(self._record.model_id),
            prefill_s_per_token=self._context.cluster.prefill_s_per_token(self._record.model_id),
            trace=self.cause.trace,
        )

    def _publish(self) -> None:
        self._published_at = now()
        self._context.publish(subjects.INSTANCES, self.set())

    def close(self) -> None:
        """Nothing serves the model from now on."""
        self.instances = ()
        self._revision = next(self._context.revisions)
        self._publish()
        self._closed = True
