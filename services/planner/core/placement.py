"""From what the registry names to who sends, who receives and who loads from its own disk."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from services.planner.core.multicast.fabric import step_task
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.core.replan import repair
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages.pool import Source, Tier
from shared.messages.scaling import Transfer

Held = Mapping[NodeId, frozenset[int]]


@dataclass(frozen=True, slots=True)
class Roles:
    sources: tuple[NodeId, ...]
    """Hold, or bring up from their own lower tier, every block."""
    promoting: tuple[NodeId, ...]
    """Targets that fetch nothing from others: they have a lower tier's copy of their own."""
    receiving: tuple[NodeId, ...]
    """Targets that pull."""
    from_disk: bool
    """What is promoted comes from disks, as slow as they are."""


def assign_roles(sources: Iterable[Source], targets: Iterable[NodeId]) -> Roles:
    """Memory copies feed the multicast; a disk copy does only when no memory copy exists.

    A target with a copy of its own in memory promotes it. PlanError if nothing is complete.
    """
    complete = [source for source in sources if source.complete]
    memory = [s.info.node for s in complete if s.tier in (Tier.GPU, Tier.HOST)]
    disk = [s.info.node for s in complete if s.tier is Tier.DISK]
    targets = tuple(targets)
    if memory:
        promoting = tuple(node for node in targets if node in memory)
        feeding = tuple(dict.fromkeys(memory))
    else:
        promoting = tuple(node for node in targets if node in disk)
        feeding = promoting
    if not feeding:
        where = f"; its only copies are on the disks of {', '.join(disk)}" if disk else ""
        raise PlanError(f"no node that could send the model has all of its blocks{where}")
    receiving = tuple(node for node in targets if node not in promoting)
    return Roles(feeding, promoting, receiving, from_disk=not memory)


def plan_transfers(roles: Roles, held: Held, blocks: int, strategy: str) -> tuple[Transfer, ...]:
    """The multicast from the sources to the receiving targets, in order of steps.

    `held`: what receiving targets have already, left there by an earlier event. With that the
    multicast is no longer the textbook's, and is planned like one that was interrupted.
    """
    if not roles.receiving:
        return ()
    if any(held.get(node) for node in roles.receiving):
        every = frozenset(range(blocks))
        now_held = {node: held.get(node, frozenset()) for node in roles.receiving}
        now_held |= dict.fromkeys(roles.sources, every)
        return repair_transfers(now_held, roles.receiving, blocks, now_held)
    nodes = (*roles.sources, *roles.receiving)
    schedule = STRATEGIES[strategy](step_task(len(nodes), blocks, range(len(roles.sources))))
    return tuple(Transfer(m.step, nodes[m.src], nodes[m.dst], m.block) for m in schedule.moves)


def repair_transfers(
    held: Held, targets: Iterable[NodeId], blocks: int, senders: Collection[NodeId]
) -> tuple[Transfer, ...]:
    """A schedule from what live nodes hold now until `targets` are complete.

    Only `senders` send. PlanError if they lack a block between them.
    """
    nodes = tuple(held)
    index = {node: i for i, node in enumerate(nodes)}
    moves = repair(
        [held[node] for node in nodes],
        blocks,
        [index[target] for target in targets],
        can_send=[index[sender] for sender in senders if sender in index],
    )
    return tuple(Transfer(m.step, nodes[m.src], nodes[m.dst], m.block) for m in moves)
