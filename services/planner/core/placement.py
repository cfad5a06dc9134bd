"""Decides, among the nodes that the registry names, who sends, who receives and who loads by
itself."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.planner.core.append import append
from services.planner.core.choose import Considered, choose
from services.planner.core.costs import (
    arrival_times,
    copy_seconds,
    physical_limit,
    schedule_arrivals,
)
from services.planner.core.forecast import NO_FORECAST, Forecast, forecast
from services.planner.core.links import Links
from services.planner.core.multicast.fabric import Task, uniform
from services.planner.core.multicast.schedule import Move, Schedule, by_step
from services.planner.core.outlook import Serving, predict
from services.planner.core.replan import repair_soonest
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages.pool import MEMORY, ModelRecord, Source, Tier
from shared.messages.scaling import Timings, Transfer

Held = Mapping[NodeId, frozenset[int]]
APPEND = "append"
"""The name of a plan for newcomers only. An event that grows keeps its own strategy's name."""
REPAIR = "repair"
"""The strategy's name, in an event's record, for a schedule that starts from partial holdings."""


@dataclass(frozen=True, slots=True)
class Roles:
    sources: tuple[NodeId, ...]
    """Nodes that hold every block, or bring it up from their own lower tier."""
    promoting: tuple[NodeId, ...]
    """Targets that fetch nothing from others, because they have a copy in a lower tier of their
    own."""
    receiving: tuple[NodeId, ...]
    """Targets that pull."""
    from_disk: bool
    """Whether promoted copies come from disks, which are slow."""
    loadable: frozenset[NodeId] = frozenset()
    """Receiving targets with a whole copy on their disk, for a strategy that loads it."""


@dataclass(frozen=True, slots=True)
class Plan:
    transfers: tuple[Transfer, ...]
    """The transfers, in order of steps."""
    strategy: str
    loading: tuple[NodeId, ...] = ()
    """Receiving targets that load from their own disk instead."""
    setup_s: float = 0.0
    forecast: Forecast = NO_FORECAST
    considered: tuple[Considered, ...] = ()
    """The candidates of the choice. None where the links' rates are not known, since candidates are
    then compared on links of one byte a second."""


def assign_roles(sources: Iterable[Source], targets: Iterable[NodeId]) -> Roles:
    """Complete copies in memory feed the multicast. If there are none, the targets with a copy on
    disk promote it, and feed the others.

    A target with its own copy in memory promotes it. PlanError if nobody can feed the multicast.
    """
    complete = [source for source in sources if source.complete]
    memory = [s.info.node for s in complete if s.tier in MEMORY]
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
    loadable = frozenset(disk).intersection(receiving)
    return Roles(feeding, promoting, receiving, from_disk=not memory, loadable=loadable)


def plan_transfers(
    roles: Roles,
    held: Held,
    model: ModelRecord,
    links: Links,
    *,
    strategy: str,
    executing: Collection[NodeId],
    max_stages: int,
) -> Plan:
    """The multicast from the sources to the receiving targets, and its forecast.

    `held`: what receiving targets hold already from an earlier event. Then the strategies for empty
    targets do not apply, and the multicast is planned like one that was interrupted. `executing`:
    the nodes that run what they hold (a source in host memory does not). PlanError if the strategy
    lets nodes load a copy that they do not have.
    """
    nodes = tuple(dict.fromkeys((*roles.sources, *roles.receiving)))
    index = {node: i for i, node in enumerate(nodes)}
    fabric = links.fabric(nodes)
    task = Task(
        fabric or uniform(len(nodes)),
        model.block_bytes,
        tuple(range(len(roles.sources))),
        model.chunk_bytes,
    )
    serving = Serving(
        max_stages,
        [index[node] for node in executing if node in index],
        links.block_s(nodes, model.model_id, model.n_blocks),
    )
    if not roles.receiving:
        plan = Plan((), strategy)
    elif any(held.get(node) for node in roles.receiving):
        plan = _from_holdings(roles, held, nodes, task, serving)
    else:
        plan = _from_nothing(roles, nodes, task, serving, strategy, links.load_rates(nodes))
    if plan.transfers and fabric is None:
        return replace(plan, forecast=NO_FORECAST, considered=())
    if roles.from_disk:
        found = _from_disks(roles, plan, nodes, task, serving, links.load_rates(nodes))
        return replace(plan, forecast=found)
    return plan


def _from_nothing(
    roles: Roles,
    nodes: Sequence[NodeId],
    task: Task,
    serving: Serving,
    strategy: str,
    load_rates: Mapping[int, float],
) -> Plan:
    choice = choose(task, serving, name=strategy, load_bytes_per_s=load_rates)
    schedule = choice.schedule
    loading = tuple(nodes[node] for node in schedule.own)
    if lacking := sorted(set(loading) - roles.loadable):
        raise PlanError(
            f"strategy {choice.strategy}: {', '.join(lacking)} has no copy of its own to load"
        )
    first_byte_s = task.fabric.overhead_s + schedule.setup_s
    return Plan(
        _transfers(choice.moves(task.blocks), nodes),
        choice.strategy,
        loading,
        schedule.setup_s,
        forecast(choice.outlook, first_byte_s, physical_limit(task)),
        choice.considered,
    )


def _from_holdings(
    roles: Roles, held: Held, nodes: Sequence[NodeId], task: Task, serving: Serving
) -> Plan:
    every = frozenset(range(task.blocks))
    now_held = [every if n in roles.sources else held.get(n, frozenset()) for n in nodes]
    wanted = [i for i, node in enumerate(nodes) if node in roles.receiving]
    moves = repair_soonest(now_held, wanted, task)
    outlook = predict(now_held, task.blocks, arrival_times(moves, task), serving)
    found = forecast(outlook, task.fabric.overhead_s, None)
    return Plan(_transfers(moves, nodes), REPAIR, forecast=found)


def _from_disks(
    roles: Roles,
    plan: Plan,
    nodes: Sequence[NodeId],
    task: Task,
    serving: Serving,
    load_rates: Mapping[int, float],
) -> Forecast:
    """The forecast if the sources bring the model up while they send it."""
    index = {node: i for i, node in enumerate(nodes)}
    own = tuple(index[node] for node in (*roles.sources, *plan.loading))
    if not load_rates.keys() >= set(own):
        return NO_FORECAST
    moves = tuple(Move(t.step, index[t.src], index[t.dst], t.block) for t in plan.transfers)
    schedule = Schedule(len(nodes), task.blocks, task.sources, moves, own, plan.setup_s)
    arrivals = schedule_arrivals(schedule, task, load_rates)
    outlook = predict([frozenset()] * len(nodes), task.blocks, arrivals, serving)
    return forecast(outlook, None, None)


def repair_transfers(
    held: Held,
    targets: Iterable[NodeId],
    model: ModelRecord,
    links: Links,
    *,
    reluctant: Collection[NodeId] = (),
) -> tuple[Transfer, ...]:
    """A schedule from what live nodes hold now until `targets` are complete.

    `reluctant` nodes (senders that failed or are slow) give only what no other node has. PlanError
    if no node holds some block.
    """
    nodes = tuple(held)
    index = {node: i for i, node in enumerate(nodes)}
    moves = repair_soonest(
        [held[node] for node in nodes],
        [index[target] for target in targets],
        Task(links.fabric(nodes) or uniform(len(nodes)), model.block_bytes, (), model.chunk_bytes),
        reluctant=[index[node] for node in reluctant if node in index],
    )
    return _transfers(moves, nodes)


def append_transfers(
    held: Held,
    running: Iterable[Transfer],
    wanted: Held,
    model: ModelRecord,
    links: Links,
    *,
    can_send: Collection[NodeId],
) -> Plan:
    """How nodes get the `wanted` blocks beside the transfers that are still `running`, and when all
    is over.

    `held`: what every node that is named holds now. PlanError if no node of `can_send` will have
    some block.
    """
    nodes = tuple(held)
    index = {node: i for i, node in enumerate(nodes)}
    fabric = links.fabric(nodes)
    task = Task(fabric or uniform(len(nodes)), model.block_bytes, (), model.chunk_bytes)
    moves = by_step(Move(t.step, index[t.src], index[t.dst], t.block) for t in running)
    appended = append(
        [held[node] for node in nodes],
        moves,
        {index[node]: blocks for node, blocks in wanted.items()},
        task,
        can_send=[index[node] for node in can_send],
    )
    plan = Plan(_transfers(appended, nodes), APPEND)
    if fabric is None or not appended:
        return plan
    over = max(arrival_times(by_step((*moves, *appended)), task).values())
    copied = [node for node in wanted if not held[node]]
    limit = copy_seconds(task) if copied else None
    return replace(plan, forecast=Forecast(Timings(all_complete_s=over), limit))


def _transfers(moves: Iterable[Move], nodes: Sequence[NodeId]) -> tuple[Transfer, ...]:
    return tuple(Transfer(m.step, nodes[m.src], nodes[m.dst], m.block) for m in moves)
