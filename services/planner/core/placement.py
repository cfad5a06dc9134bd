"""Decides, among the nodes that the registry names, who sends, who receives and who loads by
itself.

Where a model lies in several tiers, there are several *ways* to bring it to the targets: from the
copies in memory, from the disks of other nodes, from the targets' own disks, or from all of these
together, each of which then supplies a share of the blocks (`tiers`). Each way is planned, and the
way with the best score is taken.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.planner.core.append import append
from services.planner.core.choose import AUTO, LARGE, Considered, choose, score, why_not
from services.planner.core.costs import (
    Arrivals,
    arrival_times,
    copy_seconds,
    physical_limit,
)
from services.planner.core.forecast import NO_FORECAST, Forecast, forecast
from services.planner.core.links import Links
from services.planner.core.multicast.fabric import Task, uniform
from services.planner.core.multicast.schedule import Move, by_step
from services.planner.core.outlook import Outlook, Serving, predict
from services.planner.core.replan import repair_soonest
from services.planner.core.tiers import apart, load_times, shares
from shared.errors import PlanError
from shared.ids import NodeId
from shared.messages.pool import MEMORY, ModelRecord, Source
from shared.messages.scaling import Timings, Transfer

Held = Mapping[NodeId, frozenset[int]]
APPEND = "append"
"""The name of a plan for newcomers only. An event that grows keeps its own strategy's name."""
REPAIR = "repair"
"""The strategy's name, in an event's record, for a schedule that starts from partial holdings."""
LITTLE = 1.25
"""Nodes whose way out KV takes send no weights, unless the others would take this many times as
long without them."""
SHARES = "shares"
"""The strategy's name if several tiers supply a share of the blocks each."""


@dataclass(frozen=True, slots=True)
class Roles:
    memory: tuple[NodeId, ...]
    """Nodes with every block in memory, best first."""
    disk: tuple[NodeId, ...]
    """Other nodes with every block on disk, best first. Targets may be among them."""
    promoting: tuple[NodeId, ...]
    """Targets that fetch nothing, because they have a copy in memory."""
    receiving: tuple[NodeId, ...]
    """The other targets."""


@dataclass(frozen=True, slots=True)
class Plan:
    transfers: tuple[Transfer, ...]
    """The transfers, in order of steps."""
    strategy: str
    sources: tuple[NodeId, ...] = ()
    """Nodes that send, or load, what the others get."""
    loading: Held = field(default_factory=dict)
    """The blocks that targets load from their own lower tiers."""
    setup_s: float = 0.0
    forecast: Forecast = NO_FORECAST
    ports: tuple[str, ...] = ()
    """Which nodes send nothing or are slow, because KV takes their ports, in words."""
    considered: tuple[Considered, ...] = ()
    """The candidates of the choice. None where the links' rates are not known, since candidates are
    then compared on links of one byte a second."""


def assign_roles(sources: Iterable[Source], targets: Iterable[NodeId]) -> Roles:
    """Sorts the complete copies by tier, and the targets by whether they need any bytes. PlanError
    if nobody has a complete copy."""
    complete = [source for source in sources if source.complete]
    memory = dict.fromkeys(s.info.node for s in complete if s.tier in MEMORY)
    disk = dict.fromkeys(s.info.node for s in complete if s.info.node not in memory)
    if not complete:
        raise PlanError("no node that could send the model has all of its blocks")
    targets = tuple(targets)
    return Roles(
        tuple(memory),
        tuple(disk),
        tuple(node for node in targets if node in memory),
        tuple(node for node in targets if node not in memory),
    )


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
    """How the receiving targets get their blocks, and the forecast.

    `held`: what receiving targets hold already from an earlier event. Then the strategies for empty
    targets do not apply, and the multicast is planned like one that was interrupted. `executing`:
    the nodes that run what they hold (a source in host memory does not). PlanError if the strategy
    lets nodes load a copy that they do not have.

    A node whose way out KV takes (`kv_traffic`) sends nothing, unless it is the only source, or
    loading would take more than LITTLE times as long without it.
    """

    def planned(roles: Roles, links: Links) -> Plan:
        return _planned(roles, held, model, links, strategy, executing, max_stages)

    nodes = tuple(dict.fromkeys((*roles.memory, *roles.disk, *roles.receiving)))
    taken = links.taken(nodes) if roles.receiving else frozenset[NodeId]()
    if not taken:
        return _with_words(planned(roles, links), links, roles)
    try:
        spared = planned(_without(roles, taken, links), links.sparing())
    except PlanError:
        why = f"nobody but {', '.join(sorted(taken))} can send it"
        return _with_words(planned(roles, links), links, roles, why)
    used = planned(roles, links)
    if why := why_used(taken, _seconds(spared), _seconds(used)):
        return _with_words(used, links, roles, why)
    return _with_words(spared, links.sparing(), roles)


def why_used(taken: Collection[str], spared_s: float | None, used_s: float | None) -> str:
    """Why nodes send weights although KV takes their way out; empty: they do not. Seconds until all
    are complete without them and with them."""
    if spared_s is None or used_s is None or spared_s <= LITTLE * used_s:
        return ""
    times = f"{spared_s / used_s:.1f} times as long"
    return f"without {', '.join(sorted(taken))} loading would take {times}"


def _without(roles: Roles, taken: Collection[NodeId], links: Links) -> Roles:
    """The roles without sources whose way out is taken, but for those that others of their host
    reach without it."""
    hosts = {info.host for n in roles.receiving if (info := links.nodes.get(n)) and info.host}
    local = {n for n, info in links.nodes.items() if info.host in hosts and info.local_bytes_per_s}
    left_out = {*taken} - {*local} - {*roles.receiving} - {*roles.promoting}
    kept = replace(
        roles,
        memory=tuple(node for node in roles.memory if node not in left_out),
        disk=tuple(node for node in roles.disk if node not in left_out),
    )
    if not (kept.memory or kept.disk):
        raise PlanError("KV takes the way out of every node that has the model")
    return kept


def _seconds(plan: Plan) -> float | None:
    return plan.considered[0].outlook.all_complete_s if plan.considered else None


def _with_words(plan: Plan, links: Links, roles: Roles, why: str = "") -> Plan:
    """The plan, and what KV does to its nodes' ports. `why`: see `why_used`."""
    nodes = dict.fromkeys((*roles.memory, *roles.disk, *roles.receiving))
    words = tuple(links.words(nodes, receives=roles.receiving))
    return replace(plan, ports=(*words, why) if why else words)


def _planned(
    roles: Roles,
    held: Held,
    model: ModelRecord,
    links: Links,
    strategy: str,
    executing: Collection[NodeId],
    max_stages: int,
) -> Plan:
    every = frozenset(range(model.n_blocks))
    promoting = dict.fromkeys(roles.promoting, every)
    if not roles.receiving:
        return Plan((), strategy, roles.memory, promoting)
    ways = _Ways(roles, held, model, links, strategy, executing, max_stages).all()
    taken, *others = sorted(ways, key=lambda way: way.best.score)
    plan = replace(taken.plan, loading={**promoting, **taken.plan.loading})
    lost = (replace(way.best, verdict=why_not(way.best, taken.best)) for way in others)
    return replace(plan, considered=(*plan.considered, *lost))


@dataclass(frozen=True, slots=True)
class _Way:
    plan: Plan
    best: Considered
    """What it comes to."""


class _Ways:
    """The ways to bring a model to the targets. The arguments are those of `plan_transfers`."""

    def __init__(
        self,
        roles: Roles,
        held: Held,
        model: ModelRecord,
        links: Links,
        strategy: str,
        executing: Collection[NodeId],
        max_stages: int,
    ) -> None:
        self._roles = roles
        self._held = held
        self._model = model
        self._known = links
        self._links = links.assumed()
        self._strategy = strategy
        self._executing = executing
        self._max_stages = max_stages
        self._every = frozenset(range(model.n_blocks))

    def all(self) -> list[_Way]:
        """At least one way; among equals the first is preferred. Disks that were never timed do not
        compete with memory.

        If a strategy is named, or no link's rate is known, there is only one: memory before the
        targets' own disks before other disks. A share of what the own disk has might come over a
        link that is far slower. If all has to come over links, several disks share it.
        """
        roles, links = self._roles, self._links
        own = tuple(node for node in roles.disk if node in roles.receiving)
        elsewhere = (node for node in roles.disk if node not in roles.receiving)
        away = tuple(sorted(elsewhere, key=self._known.busy_s))
        nodes = tuple(dict.fromkeys((*roles.memory, *roles.disk, *roles.receiving)))
        small = len(nodes) * self._model.n_blocks < LARGE
        if self._strategy != AUTO or links.fabric(nodes) is None:
            if roles.memory:
                return [self._feed(roles.memory, ())]
            if own:
                return [self._feed((), own)]
            disks = apart(links.nodes, away)
            share = self._strategy == AUTO and len(disks) > 1 and small
            return [self._share(disks) if share else self._feed(away, ())]
        ways: list[_Way] = []
        if roles.memory or away:
            ways.append(self._feed(roles.memory or away, ()))
        if own and (not roles.memory or links.are_timed(own)):
            ways.append(self._feed(roles.memory, own))
        disks = apart(links.nodes, (*own, *away))
        several = len(disks) + len(roles.memory) > 1
        if disks and several and small and (not roles.memory or links.are_timed(disks)):
            ways.append(self._share(disks))
        return ways

    def _feed(self, senders: tuple[NodeId, ...], own: tuple[NodeId, ...]) -> _Way:
        """From `senders`, which have every block in memory, or else on their disks. `own`: targets
        that load every block from their own disks, and send it on."""
        sources = (*senders, *own)
        receiving = tuple(node for node in self._roles.receiving if node not in own)
        nodes, disks = (*sources, *receiving), {*sources} - {*self._roles.memory}
        task = self._task(nodes, disks, tuple(range(len(sources))))
        if not receiving:
            way = _way(Plan((), self._strategy, sources), Outlook())
        elif any(self._held.get(node) for node in receiving):
            way = self._from_holdings(sources, nodes, task)
        else:
            alone = self._task(nodes, disks, task.sources, alone=True)
            way = self._from_nothing(sources, nodes, task, physical_limit(alone))
        if own:
            loading = dict.fromkeys(own, self._every)
            way = self._while_loading(replace(way.plan, loading=loading), nodes)
        return self._as_known(way, nodes, disks)

    def _from_nothing(
        self, sources: tuple[NodeId, ...], nodes: Sequence[NodeId], task: Task, limit_s: float
    ) -> _Way:
        rates = self._links.load_rates(nodes)
        choice = choose(task, self._serving(nodes), name=self._strategy, load_bytes_per_s=rates)
        schedule = choice.schedule
        loading = [nodes[node] for node in schedule.own]
        if lacking := sorted({*loading} - {*self._roles.disk}):
            raise PlanError(
                f"strategy {choice.strategy}: {', '.join(lacking)} has no copy of its own to load"
            )
        first_byte_s = task.fabric.overhead_s + schedule.setup_s
        plan = Plan(
            _transfers(choice.moves(task.blocks), nodes),
            choice.strategy,
            sources,
            dict.fromkeys(loading, self._every),
            schedule.setup_s,
            forecast(choice.outlook, first_byte_s, limit_s),
            considered=choice.considered,
        )
        return _Way(plan, choice.considered[0])

    def _from_holdings(
        self, sources: tuple[NodeId, ...], nodes: Sequence[NodeId], task: Task
    ) -> _Way:
        now = [self._every if n in sources else self._held.get(n, frozenset()) for n in nodes]
        wanted = [i for i, node in enumerate(nodes) if node not in sources]
        moves = repair_soonest(now, wanted, task)
        outlook = predict(now, task.blocks, arrival_times(moves, task), self._serving(nodes))
        found = forecast(outlook, task.fabric.overhead_s, None)
        return _way(Plan(_transfers(moves, nodes), REPAIR, sources, forecast=found), outlook)

    def _share(self, disks: tuple[NodeId, ...]) -> _Way:
        """From memory and these disks together, each of which supplies a share of the blocks."""
        memory, receiving = self._roles.memory, self._roles.receiving
        nodes = tuple(dict.fromkeys((*memory, *disks, *receiving)))
        away = {*disks} - {*receiving}
        task, links = self._task(nodes, away, ()), self._links.reading(away)
        rates: dict[NodeId, float] = {}
        for node in (*memory, *disks):
            port = links.port(node)
            if port is None or node in receiving:
                rates[node] = links.disk_rate(node)
            elif port.out:
                rates[node] = port.out
        busy_s = {node: links.busy_s(node) for node in disks}
        dealt = shares(rates, task.block_bytes, dict.fromkeys(rates, self._every), busy_s)
        now = [dealt.get(n, frozenset()) | self._held.get(n, frozenset()) for n in nodes]
        wanted = [i for i, node in enumerate(nodes) if node in receiving]
        moves = repair_soonest(now, wanted, task)
        loading = {n: dealt[n] - self._held.get(n, frozenset()) for n in disks if n in receiving}
        sources = tuple(rates)
        plan = Plan(_transfers(moves, nodes), SHARES, sources, loading)
        return self._as_known(self._while_loading(plan, nodes), nodes, disks)

    def _while_loading(self, plan: Plan, nodes: Sequence[NodeId]) -> _Way:
        """The plan, timed with what targets load from their disks meanwhile."""
        away = {*plan.sources} - {*self._roles.memory} - {*plan.loading}
        task = self._task(nodes, away, ())
        index = {node: i for i, node in enumerate(nodes)}
        loading = {index[node]: blocks for node, blocks in plan.loading.items()}
        ready = load_times(loading, self._links.load_rates(nodes), task.block_bytes)
        moves = [Move(t.step, index[t.src], index[t.dst], t.block) for t in plan.transfers]
        arrivals = _after(ready, arrival_times(moves, task, ready), plan.setup_s)
        full = {*self._roles.memory}
        now = [self._every if n in full else self._held.get(n, frozenset()) for n in nodes]
        outlook = predict(now, task.blocks, arrivals, self._serving(nodes))
        return _way(replace(plan, forecast=forecast(outlook, None, None)), outlook)

    def _as_known(self, way: _Way, nodes: Sequence[NodeId], disks: Collection[NodeId]) -> _Way:
        """Without what is predicted from rates that are not known."""
        plan = way.plan
        if self._known.fabric(nodes) is None and plan.transfers:
            plan = replace(plan, considered=())
        if not (plan.considered and self._links.are_timed({*disks, *plan.loading})):
            plan = replace(plan, forecast=NO_FORECAST)
        return replace(way, plan=plan)

    def _task(
        self,
        nodes: Sequence[NodeId],
        disks: Collection[NodeId],
        sources: tuple[int, ...],
        *,
        alone: bool = False,
    ) -> Task:
        """`disks`: nodes that send from their disks. `alone`: links carry nothing else."""
        links = self._links.reading(disks)
        links = links.alone() if alone else links
        fabric = links.fabric(nodes) or uniform(len(nodes))
        return Task(fabric, self._model.block_bytes, sources, self._model.chunk_bytes)

    def _serving(self, nodes: Sequence[NodeId]) -> Serving:
        return Serving(
            self._max_stages,
            [i for i, node in enumerate(nodes) if node in self._executing],
            self._links.block_s(nodes, self._model.model_id, self._model.n_blocks),
        )


def _way(plan: Plan, outlook: Outlook) -> _Way:
    considered = Considered(plan.strategy, 1, score(outlook), outlook, "")
    return _Way(replace(plan, considered=(considered,)), considered)


def _after(ready: Arrivals, moved: Arrivals, setup_s: float) -> Arrivals:
    return {**ready, **{key: at + setup_s for key, at in moved.items()}}


def repair_transfers(
    held: Held,
    targets: Iterable[NodeId],
    model: ModelRecord,
    links: Links,
    *,
    reluctant: Collection[NodeId] = (),
) -> tuple[Transfer, ...]:
    """A schedule from what live nodes hold now until `targets` are complete.

    `reluctant` nodes (senders that failed or are slow), and those whose way out KV takes, give only
    what no other node has. PlanError if no node holds some block.
    """
    nodes = tuple(held)
    index = {node: i for i, node in enumerate(nodes)}
    moves = repair_soonest(
        [held[node] for node in nodes],
        [index[target] for target in targets],
        Task(links.fabric(nodes) or uniform(len(nodes)), model.block_bytes, (), model.chunk_bytes),
        reluctant=[index[n] for n in {*reluctant, *links.taken(nodes)} if n in index],
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

    `held`: what every node that is named holds now. Nodes whose way out KV takes send nothing, if
    others can. PlanError if no node of `can_send` will have some block.
    """
    nodes = tuple(held)
    index = {node: i for i, node in enumerate(nodes)}
    fabric = links.fabric(nodes)
    task = Task(fabric or uniform(len(nodes)), model.block_bytes, (), model.chunk_bytes)
    moves = by_step(Move(t.step, index[t.src], index[t.dst], t.block) for t in running)

    def appended_by(senders: Collection[NodeId]) -> tuple[Move, ...]:
        return append(
            [held[node] for node in nodes],
            moves,
            {index[node]: blocks for node, blocks in wanted.items()},
            task,
            can_send=[index[node] for node in senders],
        )

    taken = links.taken(can_send)
    try:
        appended = appended_by({*can_send} - taken)
    except PlanError:
        if not taken:
            raise
        appended = appended_by(can_send)
    plan = Plan(_transfers(appended, nodes), APPEND)
    if fabric is None or not appended:
        return plan
    over = max(arrival_times(by_step((*moves, *appended)), task).values())
    copied = [node for node in wanted if not held[node]]
    limit = copy_seconds(task) if copied else None
    return replace(plan, forecast=Forecast(Timings(all_complete_s=over), limit))


def _transfers(moves: Iterable[Move], nodes: Sequence[NodeId]) -> tuple[Transfer, ...]:
    return tuple([Transfer(step, nodes[src], nodes[dst], block) for step, src, dst, block in moves])
