"""The instances of a model, from what its members hold now and which instances there were.

Two steps. `plan` says which stages should serve and how much of the load: a pure function that
takes a while on large clusters. `revise` turns that into the next set of instances, at once, and
whatever happened to the members meanwhile: it never keeps an instance that cannot run.

A complete member is a replica. Members that hold a part, together with complete ones, form paths.
An instance, once made, keeps its id and its stages for life; when the plan no longer wants it, it
drains (other paths took over) or moves (its nodes are complete: local execution is faster).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from services.planner.core.paths import Path, plan_paths
from shared.ids import EventId, InstanceId, NodeId
from shared.messages.instances import Instance, InstanceState, Stage

Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A node that serves, or will serve, a model."""

    node: NodeId
    address: str
    slots: int
    held: frozenset[int]
    event: EventId | None
    """The event that loads it, or did; None if it was found loaded."""
    trace: str = ""
    """Of that event."""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    blocks: int
    max_stages: int
    hop_cost: float


def loading(members: Mapping[NodeId, Member], blocks: int) -> bool:
    """Whether some member is not complete yet."""
    return any(len(m.held) < blocks for m in members.values())


def plan(
    previous: Iterable[Instance], members: Mapping[NodeId, Member], limits: Limits
) -> dict[Stages, float]:
    """Stages that should take new requests -> their capacity, in units of a complete node.

    While nothing loads these are the complete members, each with a capacity of 1. Otherwise the
    capacities share out what every node can do between the instances that it is a stage of.
    """
    nodes = [m for m in members.values() if not m.draining]
    if not loading(members, limits.blocks):
        return {_alone(member, limits.blocks): 1.0 for member in nodes}
    index = {member.node: i for i, member in enumerate(nodes)}
    planned = plan_paths(
        [member.held for member in nodes],
        limits.blocks,
        max_stages=limits.max_stages,
        hop_cost=limits.hop_cost,
        previous=[
            Path(tuple((index[s.node], s.start, s.stop) for s in i.stages), i.capacity)
            for i in previous
            if i.state is InstanceState.SERVING and all(s.node in index for s in i.stages)
        ],
    )
    return {
        tuple(Stage(nodes[i].node, nodes[i].address, start, stop) for i, start, stop in p.stages): (
            p.weight
        )
        for p in planned
    }


def revise(
    previous: Iterable[Instance],
    members: Mapping[NodeId, Member],
    planned: Mapping[Stages, float],
    blocks: int,
    *,
    busy: Callable[[InstanceId], bool],
    new_id: Callable[[str], str],
    event: EventId | None,
) -> tuple[Instance, ...]:
    """The next set. `planned` may be of a while ago; `busy`: whether requests still run on an
    instance; `new_id` makes the ids of paths, which are said to be of `event`.
    """
    kept = {i.stages: i for i in previous if all(_holds(members, stage) for stage in i.stages)}
    result: dict[Stages, Instance] = {}
    for member in members.values():
        if len(member.held) == blocks:
            stages = _alone(member, blocks)
            result[stages] = _replica(member, stages, kept.get(stages), planned.get(stages, 1.0))
    for stages, capacity in planned.items():
        if len(stages) > 1 and all(_takes(members, stage) for stage in stages):
            leader = members[stages[0].node]
            result[stages] = _path(stages, leader, kept.get(stages), capacity, new_id, event)
    for stages, instance in kept.items():
        if stages not in result and busy(instance.id):
            result[stages] = _retired(instance, moving=not loading(members, blocks))
    return tuple(result.values())


def _alone(member: Member, blocks: int) -> Stages:
    return (Stage(member.node, member.address, 0, blocks),)


def _holds(members: Mapping[NodeId, Member], stage: Stage) -> bool:
    member = members.get(stage.node)
    return (
        member is not None
        and member.address == stage.address
        and member.held.issuperset(range(stage.start, stage.stop))
    )


def _takes(members: Mapping[NodeId, Member], stage: Stage) -> bool:
    return _holds(members, stage) and not members[stage.node].draining


def _replica(member: Member, stages: Stages, known: Instance | None, capacity: float) -> Instance:
    return Instance(
        id=InstanceId(f"replica-{member.node}"),
        stages=stages,
        state=InstanceState.DRAINING if member.draining else InstanceState.SERVING,
        capacity=capacity,
        slots=member.slots,
        event=known.event if known is not None else member.event,
    )


def _path(
    stages: Stages,
    leader: Member,
    known: Instance | None,
    capacity: float,
    new_id: Callable[[str], str],
    event: EventId | None,
) -> Instance:
    # A leader runs no more sequences than it has slots, however much the path could carry.
    slots = min(leader.slots, max(1, round(capacity * leader.slots)))
    return Instance(
        id=known.id if known is not None else InstanceId(new_id("path")),
        stages=stages,
        state=InstanceState.SERVING,
        capacity=capacity,
        slots=slots,
        event=known.event if known is not None else event,
    )


def _retired(instance: Instance, *, moving: bool) -> Instance:
    """What has begun to move goes on moving, whatever loads next."""
    moving = moving or instance.state is InstanceState.MOVING
    state = InstanceState.MOVING if moving else InstanceState.DRAINING
    return msgspec.structs.replace(instance, state=state)
