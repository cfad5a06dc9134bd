"""Chooses a multicast: plans every sensible one on paper and compares their predictions.

A candidate is a strategy together with a unit, a number of consecutive blocks that move as one.
Small units cost alpha at every change of partners; large units take long to fill the pipeline
(`costs.best_blocks`). The candidate with the lowest score wins. A candidate whose score cannot be
the lowest, whatever its schedule, is ruled out before its schedule is made; on large clusters with
equal links that rules out all but the winner.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from services.planner.core.costs import (
    are_equal,
    best_blocks,
    block_seconds,
    copy_seconds,
    equal_links_seconds,
    is_uniform,
    least_seconds,
    schedule_arrivals,
)
from services.planner.core.multicast.fabric import Task
from services.planner.core.multicast.schedule import Move, Schedule
from services.planner.core.multicast.strategies import lower_bound, strategy
from services.planner.core.outlook import Outlook, Serving, equal_links_capacity, predict
from shared.errors import PlanError

AUTO = "auto"
CANDIDATES = ("binomial", "head", "taps", "chain")
"""The strategies to choose from; among equals, the first is preferred. The other strategies exist
for comparison."""
STREAMED = ("head", "chain")
"""Strategies in which a node gets everything from a single node."""
FOR_UNEQUAL_LINKS = ("taps", "chain")
EARLY = 0.5
"""The worth of a second of the whole cluster's service while loading, in seconds of loading."""
LARGE = 12_288
"""From this number of nodes x blocks on, closed forms stand in for schedules where they hold. Where
they do not hold, only strategies for unequal links are tried, with one size of unit, so that
planning does not take seconds."""
RULED_OUT = "cannot be better: ruled out before it was planned"


@dataclass(frozen=True)
class Considered:
    strategy: str
    unit: int
    """Number of blocks that move as one."""
    score: float
    """Seconds until all nodes are complete, less `EARLY` x the service before then, in seconds of
    the whole cluster's service. For a candidate that was ruled out, a lower bound."""
    outlook: Outlook
    verdict: str
    """Why it was not chosen. Empty for the chosen candidate."""

    def __str__(self) -> str:
        return f"{self.strategy} x {self.unit}: {self.score:.3f} s, {self.verdict or 'chosen'}"


@dataclass(frozen=True)
class Choice:
    strategy: str
    unit: int
    schedule: Schedule
    """A schedule of units: its block u stands for the blocks from u x unit on."""
    outlook: Outlook
    considered: tuple[Considered, ...]
    """The chosen candidate first, then the others by score."""

    def moves(self, blocks: int) -> Iterator[Move]:
        """The moves of single blocks. Blocks of one unit have the same step."""
        if self.unit == 1:
            yield from self.schedule.moves
            return
        for step, src, dst, unit in self.schedule.moves:
            start = unit * self.unit
            for block in range(start, min(start + self.unit, blocks)):
                yield Move(step, src, dst, block)


def choose(
    task: Task,
    serving: Serving,
    *,
    name: str = AUTO,
    load_bytes_per_s: Mapping[int, float] | None = None,
) -> Choice:
    """The best candidate, or the strategy `name` with every block moved by itself.

    `load_bytes_per_s`: see `costs.schedule_arrivals`. PlanError if no candidate's schedule
    completes every destination; BadInput for an unknown name.
    """
    judge = _Judge(task, serving, load_bytes_per_s or {})
    if name != AUTO or not task.destinations:
        return judge.fixed(CANDIDATES[0] if name == AUTO else name)
    return judge.best()


def units(task: Task, size: int) -> Task:
    """The task with every `size` consecutive blocks merged into one."""
    sizes = task.block_bytes
    merged = tuple(sum(sizes[i : i + size]) for i in range(0, len(sizes), size))
    return replace(task, block_bytes=merged)


def unit_sizes(task: Task) -> tuple[int, ...]:
    """The sizes of unit that are worth a try: single blocks, and what the closed form gives for the
    slowest and for the fastest port, with the neighbouring sizes. The first is the best guess.

    If relays forward chunks, only single blocks are tried. On real ports the cost of a change of
    partners grows with what moves between two changes, so larger units save nothing. (Measured with
    four nodes, links of 400 Mbit/s, 64 MiB in chunks of 256 KiB, binomial: 1.06 x the limit in
    blocks of 512 KiB, 1.21 x in blocks of 2 MiB, of which steps alone explain 1.03 x.)
    """
    fabric = task.fabric
    if fabric.overhead_s <= 0 or task.chunk_bytes:
        return (1,)
    rates = [rate for port in fabric.ports for rate in (port.out, port.into) if rate > 0]
    sizes: list[int] = []
    for rate in (min(rates), max(rates)):
        size = -(-task.blocks // best_blocks(task, rate, most=task.blocks))
        sizes += (size, size - 1, size + 1)
    sizes = [min(max(size, 1), task.blocks) for size in (*sizes, 1)]
    return tuple(dict.fromkeys(sizes))


@dataclass(frozen=True)
class _Candidate:
    strategy: str
    unit: int
    task: Task
    floor: Outlook
    score: float
    """A lower bound of the score."""
    exact: bool
    """Whether the floor is exact, as it is on equal links with equal blocks."""


class _Judge:
    def __init__(self, task: Task, serving: Serving, load_bytes_per_s: Mapping[int, float]) -> None:
        self._task = task
        self._serving = serving
        self._load_bytes_per_s = load_bytes_per_s
        self._equal_links = is_uniform(task.fabric)
        self._large = task.nodes * task.blocks >= LARGE

    def fixed(self, name: str) -> Choice:
        schedule = strategy(name)(self._task)
        outlook = self._simulate(schedule, self._task)
        considered = Considered(name, 1, score(outlook), outlook, "")
        return Choice(name, 1, schedule, outlook, (considered,))

    def best(self) -> Choice:
        best: Considered | None = None
        schedule: Schedule | None = None
        judged: list[Considered] = []
        for candidate in sorted(self._candidates(), key=lambda c: c.score):
            name, unit = candidate.strategy, candidate.unit
            if best is not None and candidate.score >= best.score:
                judged.append(Considered(name, unit, candidate.score, candidate.floor, RULED_OUT))
                continue
            made, outlook = self._evaluate(candidate)
            found = Considered(name, unit, score(outlook), outlook, "")
            judged.append(found)
            if found.score < (best.score if best else math.inf):
                best, schedule = found, made
        if best is None:
            raise PlanError("no multicast reaches every destination over these links")
        others = sorted((c for c in judged if c is not best), key=lambda c: c.score)
        if schedule is None:
            task = units(self._task, best.unit)
            schedule = strategy(best.strategy)(task)
            best = replace(
                best, outlook=self._in_steps(best.strategy, schedule, task, best.outlook)
            )
        return Choice(
            best.strategy,
            best.unit,
            schedule,
            best.outlook,
            (best, *(replace(c, verdict=why_not(c, best)) for c in others)),
        )

    def _candidates(self) -> Iterator[_Candidate]:
        names: tuple[str, ...] = CANDIDATES
        sizes = unit_sizes(self._task)
        if self._large and not self._equal_links:
            names, sizes = FOR_UNEQUAL_LINKS, sizes[:1]
        for size in sizes:
            task = units(self._task, size)
            exact = self._equal_links and are_equal(task.block_bytes[:-1] or task.block_bytes)
            floors: dict[int, Outlook] = {}
            for name in names:
                if exact:
                    floor = self._on_equal_links(name, task)
                else:
                    fill = _fill(name, task)
                    floor = floors.get(fill) or _floor(task, fill)
                    floors[fill] = floor
                yield _Candidate(name, size, task, floor, score(floor), exact)

    def _on_equal_links(self, name: str, task: Task) -> Outlook:
        """The exact time, and a capacity that no schedule can exceed."""
        over = equal_links_seconds(name, task)
        steps = math.ceil(over / (block_seconds(task) - task.fabric.overhead_s) * (1 - 1e-9))
        share = equal_links_capacity(
            task.nodes,
            task.blocks,
            len(task.sources),
            steps,
            sources_run=self._sources_run(),
            whole_blocks=task.first_chunks == task.block_bytes,
        )
        return Outlook(all_complete_s=over, mean_capacity=share)

    def _evaluate(self, candidate: _Candidate) -> tuple[Schedule | None, Outlook]:
        if self._large and candidate.exact:
            return None, candidate.floor
        schedule = strategy(candidate.strategy)(candidate.task)
        return schedule, self._simulate(schedule, candidate.task)

    def _in_steps(self, name: str, schedule: Schedule, task: Task, outlook: Outlook) -> Outlook:
        """Adds the times that follow from the steps of a schedule on equal links."""
        block_s, over = block_seconds(task), outlook.all_complete_s or 0.0
        if name in STREAMED:
            first = copy_seconds(task)
        else:
            last = {move.dst: move.step for move in schedule.moves}
            first = min(min(last.values()) * block_s, over)
        early = self._serving.max_stages > 1 and self._sources_run()
        return replace(
            outlook,
            first_path_s=block_s if early else None,
            first_complete_s=first,
        )

    def _sources_run(self) -> bool:
        return set(self._serving.nodes(self._task.nodes)) >= set(self._task.sources)

    def _simulate(self, schedule: Schedule, task: Task) -> Outlook:
        arrivals = schedule_arrivals(schedule, task, self._load_bytes_per_s)
        held = schedule.held(0)
        outlook = predict(held, task.blocks, arrivals, self._serving_units(task))
        reached = {node for node, _ in arrivals}
        if not reached >= set(task.destinations):
            return replace(outlook, all_complete_s=None)
        return outlook

    def _serving_units(self, task: Task) -> Serving:
        """The serving parameters for units, whose blocks run one after the other."""
        block_s, share = self._serving.block_s, self._task.blocks / task.blocks
        if block_s is None:
            return self._serving
        return replace(self._serving, block_s={n: s * share for n, s in block_s.items()})


def _fill(name: str, task: Task) -> int:
    """How many hops behind a source the strategy's last destination begins."""
    nodes, sources = task.nodes, len(task.sources)
    least = max(lower_bound(nodes, 1, sources) - 1, 0)
    return max(least, -(-nodes // sources) - 2) if name == "chain" else least


def _floor(task: Task, fill: int) -> Outlook:
    """A bound that no schedule with this many hops beats."""
    return Outlook(all_complete_s=least_seconds(task, fill=fill), mean_capacity=1.0)


def score(outlook: Outlook) -> float:
    """See `Considered.score`."""
    over = outlook.all_complete_s
    return math.inf if over is None else over * (1 - EARLY * (outlook.mean_capacity or 0.0))


def why_not(other: Considered, best: Considered) -> str:
    over, best_over = other.outlook.all_complete_s, best.outlook.all_complete_s
    if other.verdict or over is None or best_over is None:
        return other.verdict or "does not reach every node over these links"
    if over > best_over * 1.001:
        return f"is over {over - best_over:.3f} s later"
    if other.score > best.score:
        return "serves less while it loads"
    return "as good, and less simple"
