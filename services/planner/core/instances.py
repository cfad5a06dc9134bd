"""The instances of a model, from what its members hold now and which instances there were.

Two steps. `plan` says which stages should serve and how much of the load: a pure function that
takes a while on large clusters. `revise` turns that into the next set of instances, at once, and
whatever happened to the members meanwhile: it never keeps an instance that cannot run.

A complete member is a replica. Of a model that fits no device, complete members have a part each,
and form groups. Members that still load form paths, together with complete ones.
An instance, once made, keeps its id and its stages for life; when the plan no longer wants it, it
drains (other paths took over) or moves (its nodes are complete: local execution is faster).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from services.planner.core.paths import HOP_COST, WeightedPath
from services.planner.core.serving.loading import Loading, ServingStrategy
from shared.ids import EventId, InstanceId, NodeId
from shared.messages.instances import Instance, InstanceState, Stage
from shared.parts import Part
from shared.slots import granted

Stages = tuple[Stage, ...]
GROUP_HOP_COST = 0.02
"""`HOP_COST` where nodes hold only the parts of a group: a token takes the time of one pass in all,
and a little for each hop."""


class Member(msgspec.Struct, frozen=True):
    """A node that serves, or will serve, a model."""

    node: NodeId
    address: str
    slots: int
    held: frozenset[int]
    event: EventId | None
    """The event that loads it, or did; None if it was found loaded."""
    trace: str = ""
    """The traceparent of that event."""
    draining: bool = False
    speed: float = 1.0
    """Its capacity when it is complete: how fast it runs the model, relative to other nodes."""
    source: bool = False
    """Whether it was complete before the current loading, or the last one, began."""
    since: float = 0.0
    """When it became a member."""
    had: int = 0
    """How many blocks it held then."""
    host: str = ""
    """Its machine."""
    part: Part | None = None
    """The blocks that it is to hold, as one device of a group. None: all."""
    wakes: bool = False
    """Whether all that it is to hold was in its own memory when it became a member."""

    def is_complete(self, blocks: int) -> bool:
        """Whether it has all that it is to hold, of a model with so many blocks."""
        return len(self.held) == (self.part.size if self.part else blocks)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules by which a model's paths are planned."""

    blocks: int
    max_stages: int
    hop_cost: float
    strategy: ServingStrategy


def rules(blocks: int, parts: int, max_stages: int, strategy: ServingStrategy) -> Rules:
    """The rules for a model of `blocks` blocks. `parts`: how many parts it is cut into; 1: a node
    holds all of it. A path over old and new groups may change from one to the other and back."""
    if parts == 1:
        return Rules(blocks, max_stages, HOP_COST, strategy)
    return Rules(blocks, parts + max_stages, GROUP_HOP_COST, strategy)


def join(members: dict[NodeId, Member], member: Member, blocks: int) -> None:
    """Puts `member` among the members. Complete members become sources when a loading begins."""
    if not loading(members, blocks):
        for node, known in members.items():
            members[node] = msgspec.structs.replace(known, source=True)
    complete = member.is_complete(blocks)
    members[member.node] = msgspec.structs.replace(member, source=complete)


def loading(members: Mapping[NodeId, Member], blocks: int) -> bool:
    """Whether some member is not complete yet."""
    return not all(m.is_complete(blocks) for m in members.values())


def plan(
    previous: Iterable[Instance], members: Mapping[NodeId, Member], rules: Rules
) -> dict[Stages, float]:
    """The stages that should take new requests, with their capacity in units of a complete node.

    While nothing loads, these are the complete members, each with its speed as capacity, and the
    groups. Otherwise the capacities divide what every node can do among the instances that it is a
    stage of.
    """
    nodes = [m for m in members.values() if not m.draining]
    if not loading(members, rules.blocks):
        alone = (m for m in nodes if m.part is None)
        return {_alone(member, rules.blocks): member.speed for member in alone} | groups(
            (i.stages for i in previous), nodes, rules.blocks
        )
    index = {member.node: i for i, member in enumerate(nodes)}
    planned = rules.strategy(
        Loading(
            held=[member.held for member in nodes],
            blocks=rules.blocks,
            speeds=[member.speed for member in nodes],
            sources={index[member.node] for member in nodes if member.source},
            max_stages=rules.max_stages,
            hop_cost=rules.hop_cost,
            previous=tuple(
                WeightedPath(tuple((index[s.node], s.start, s.stop) for s in i.stages), i.capacity)
                for i in previous
                if i.state is InstanceState.SERVING and all(s.node in index for s in i.stages)
            ),
        )
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
    opening: NodeId | None = None,
) -> tuple[Instance, ...]:
    """The next set. `planned` may be some time old. `busy`: whether requests still run on an
    instance, as far as is known. `new_id` makes the ids of paths, which are ascribed to `event`.
    `opening`: a member that may take requests although it lacks blocks."""
    kept = {i.stages: i for i in previous if all(_holds(members, stage) for stage in i.stages)}
    paths = {
        stages: capacity
        for stages, capacity in planned.items()
        if len(stages) > 1 and all(_takes(members, stage) for stage in stages)
    }
    spare = _spare(paths, members, blocks)
    result: dict[Stages, Instance] = {}
    for member in members.values():
        if member.part is None and member.is_complete(blocks):
            stages = _alone(member, blocks)
            capacity = planned.get(stages, spare.get(member.node, member.speed))
            result[stages] = _replica(member, stages, kept.get(stages), capacity)
        elif member.node == opening:
            stages = _alone(member, blocks)
            replica = _replica(member, stages, None, spare.get(member.node, member.speed))
            result[stages] = msgspec.structs.replace(replica, opening=True)
    for stages, capacity in paths.items():
        rates = [_rate(members[stage.node]) for stage in stages]
        group = is_group(stages, members)
        slots = granted(capacity, rates, group=group)
        path = _path(stages, slots, kept.get(stages), capacity, new_id, event, group=group)
        result[stages] = path
    moving = not loading(members, blocks)
    for stages, instance in kept.items():
        if stages not in result and busy(instance.id):
            result[stages] = _retired(instance, moving=moving and not instance.group)
    return tuple(result.values())


def is_group(stages: Stages, members: Mapping[NodeId, Member]) -> bool:
    """Whether each stage is all that its node is to hold."""
    return all(Part(stage.start, stage.stop) == members[stage.node].part for stage in stages)


def groups(
    previous: Iterable[Stages], members: Iterable[Member], blocks: int
) -> dict[Stages, float]:
    """The groups that complete members form, with their capacities. Those that there were stay;
    else devices of one machine go together, and those that joined first.

    The slowest stage bounds a group: while it runs one token, the other stages run others.
    """
    free: dict[Part, list[Member]] = {}
    for member in members:
        if member.part is not None and member.is_complete(blocks):
            free.setdefault(member.part, []).append(member)
    cut, found = sorted(free), list[tuple[Member, ...]]()
    if [b for part in cut for b in part.blocks] != list(range(blocks)):
        return {}

    def take(*chosen: Member) -> None:
        found.append(chosen)
        for part, member in zip(cut, chosen, strict=True):
            free[part].remove(member)

    known = {(m.node, m.address, part): m for part, each in free.items() for m in each}
    for stages in previous:
        devices = [known.get((s.node, s.address, Part(s.start, s.stop))) for s in stages]
        there = [m for m in devices if m is not None and m.part and m in free[m.part]]
        if len(there) == len(stages) == len(cut):
            take(*there)
    while all(free.values()):
        first = free[cut[0]][0]
        take(
            *(next((m for m in free[part] if m.host == first.host), free[part][0]) for part in cut)
        )
    return {_stages(group, cut): _group_speed(group, cut, blocks) for group in found}


def _stages(group: Iterable[Member], cut: Iterable[Part]) -> Stages:
    return tuple(
        Stage(m.node, m.address, part.start, part.stop) for m, part in zip(group, cut, strict=True)
    )


def _group_speed(group: Iterable[Member], cut: Iterable[Part], blocks: int) -> float:
    return min(m.speed * blocks / part.size for m, part in zip(group, cut, strict=True))


def node_slots(
    instances: Iterable[Instance], members: Mapping[NodeId, Member]
) -> dict[NodeId, int]:
    """The slots of every node that is a stage of a path, unless it has just left: its paths go with
    the next revision."""
    nodes = {stage.node for i in instances if not i.is_replica for stage in i.stages}
    return {node: members[node].slots for node in sorted(nodes) if node in members}


def _rate(member: Member) -> tuple[int, float]:
    return member.slots, member.speed


def _spare(
    paths: Mapping[Stages, float], members: Mapping[NodeId, Member], blocks: int
) -> dict[NodeId, float]:
    """The capacity that paths leave of their nodes. A node that is not in it has all of its
    capacity left: it became complete after the plan was made."""
    spare: dict[NodeId, float] = {}
    for stages, capacity in paths.items():
        for stage in stages:
            share = capacity * (stage.stop - stage.start) / blocks
            left = spare.get(stage.node, members[stage.node].speed)
            spare[stage.node] = max(0.0, left - share)
    return spare


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
        slots=granted(capacity, [_rate(member)]),
        event=known.event if known is not None else member.event,
    )


def _path(
    stages: Stages,
    slots: int,
    known: Instance | None,
    capacity: float,
    new_id: Callable[[str], str],
    event: EventId | None,
    *,
    group: bool,
) -> Instance:
    return Instance(
        id=known.id if known is not None else InstanceId(new_id("group" if group else "path")),
        stages=stages,
        state=InstanceState.SERVING,
        capacity=capacity,
        slots=slots,
        event=known.event if known is not None else event,
        group=group,
    )


def _retired(instance: Instance, *, moving: bool) -> Instance:
    """The instance in the state in which it takes no more requests. An instance that has begun to
    move goes on moving, whatever loads next."""
    moving = moving or instance.state is InstanceState.MOVING
    state = InstanceState.MOVING if moving else InstanceState.DRAINING
    return msgspec.structs.replace(instance, state=state)
