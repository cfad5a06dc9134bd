"""The instances of a model, from what its members hold now and which instances there were.

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


@dataclass(frozen=True, slots=True)
class Member:
    """A node that serves, or will serve, a model."""

    node: NodeId
    address: str
    slots: int
    held: frozenset[int]
    event: EventId | None
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    blocks: int
    max_stages: int
    hop_cost: float


def revise(
    previous: Iterable[Instance],
    members: Mapping[NodeId, Member],
    limits: Limits,
    *,
    busy: Callable[[InstanceId], bool],
    new_id: Callable[[str], str],
    event: EventId | None,
) -> tuple[Instance, ...]:
    """The next set. `busy`: whether requests still run on an instance; `new_id` makes path ids."""
    kept = [i for i in previous if all(_holds(members, stage) for stage in i.stages)]
    by_stages = {instance.stages: instance for instance in kept}
    result: dict[tuple[Stage, ...], Instance] = {}
    loading = any(len(m.held) < limits.blocks for m in members.values() if not m.draining)
    for member in members.values():
        if len(member.held) == limits.blocks:
            replica = _replica(member, by_stages, limits.blocks)
            result[replica.stages] = replica
    if loading:
        for path in _paths(members, limits, kept):
            instance = _path_instance(path, members, by_stages, new_id, event)
            result.setdefault(instance.stages, instance)
    for instance in kept:
        if instance.stages not in result and busy(instance.id):
            state = InstanceState.DRAINING if loading else InstanceState.MOVING
            result[instance.stages] = msgspec.structs.replace(instance, state=state)
    return tuple(result.values())


def _holds(members: Mapping[NodeId, Member], stage: Stage) -> bool:
    member = members.get(stage.node)
    return (
        member is not None
        and member.address == stage.address
        and member.held.issuperset(range(stage.start, stage.stop))
    )


def _replica(
    member: Member, by_stages: Mapping[tuple[Stage, ...], Instance], blocks: int
) -> Instance:
    stages = (Stage(member.node, member.address, 0, blocks),)
    state = InstanceState.DRAINING if member.draining else InstanceState.SERVING
    known = by_stages.get(stages)
    if known is not None:
        return msgspec.structs.replace(known, state=state, capacity=1.0, slots=member.slots)
    return Instance(
        id=InstanceId(f"replica-{member.node}"),
        stages=stages,
        state=state,
        capacity=1.0,
        slots=member.slots,
        event=member.event,
    )


def _paths(
    members: Mapping[NodeId, Member], limits: Limits, kept: Iterable[Instance]
) -> list[tuple[tuple[tuple[NodeId, int, int], ...], float]]:
    """Paths of several stages with their weights, over members that take new requests."""
    nodes = [m for m in members.values() if not m.draining]
    index = {member.node: i for i, member in enumerate(nodes)}
    earlier = tuple(
        Path(tuple((index[s.node], s.start, s.stop) for s in i.stages), i.capacity)
        for i in kept
        if i.state is InstanceState.SERVING and all(s.node in index for s in i.stages)
    )
    planned = plan_paths(
        [member.held for member in nodes],
        limits.blocks,
        max_stages=limits.max_stages,
        hop_cost=limits.hop_cost,
        previous=earlier,
    )
    return [
        (tuple((nodes[i].node, start, stop) for i, start, stop in path.stages), path.weight)
        for path in planned
        if len(path.stages) > 1
    ]


def _path_instance(
    path: tuple[tuple[tuple[NodeId, int, int], ...], float],
    members: Mapping[NodeId, Member],
    by_stages: Mapping[tuple[Stage, ...], Instance],
    new_id: Callable[[str], str],
    event: EventId | None,
) -> Instance:
    parts, weight = path
    stages = tuple(Stage(node, members[node].address, start, stop) for node, start, stop in parts)
    slots = max(1, round(weight * members[stages[0].node].slots))
    known = by_stages.get(stages)
    if known is not None:
        return msgspec.structs.replace(
            known, state=InstanceState.SERVING, capacity=weight, slots=slots
        )
    return Instance(
        id=InstanceId(new_id("path")),
        stages=stages,
        state=InstanceState.SERVING,
        capacity=weight,
        slots=slots,
        event=event,
    )
