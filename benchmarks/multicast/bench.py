"""How long a model takes from one node to all, by strategy, against what the links allow.

Every number of nodes is measured on the same hosts: first our strategies in turn, run after run, so
that other work of the machine affects all alike, then the peers. Nothing is tuned for any of them:
nodes run with their defaults, and the links pace themselves.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.multicast.model import checkpoint_spec
from benchmarks.multicast.nodes import Nodes
from benchmarks.multicast.peers import run_peers
from benchmarks.testbed import Testbed, Wiring, goodput
from services.local.demo_model import make_checkpoint
from services.planner.core.choose import AUTO, Choice, choose
from services.planner.core.multicast.fabric import Fabric, Port, Task
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.core.outlook import Serving
from shared.config import PlannerConfig
from shared.messages.pool import ModelRecord

OURS = (AUTO, "binomial", "head", "chain", "taps", "tree")
"""`local` moves nothing between nodes. `broadcast` is `chain` after a group was formed, which this
transport does not need: gloo stands for it."""
TREE = "tree"
SETTLE_S = 0.25
"""Seconds between two runs, so that what one run leaves behind does not disturb the next."""
PATIENCE = 30
"""A run that takes this many times the limit has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    nodes: tuple[int, ...]
    strategies: tuple[str, ...]
    link_mbit: float
    nbytes: int
    blocks: int
    runs: int
    racks: tuple[int, ...]
    """Racks to measure besides, behind trunks of `trunk_mbit`. Empty: none."""
    trunk_mbit: float
    peers: bool


@dataclass(slots=True)
class Row:
    """One strategy with one number of nodes."""

    n: int
    strategy: str
    limit_s: float
    """The time of a copy at a link's goodput."""
    racks: tuple[int, ...] = ()
    bound_s: float = 0.0
    """With racks, the time that the planner's taps take on paper. Else 0."""
    chosen: str = ""
    """The strategy that `auto` chose."""
    makespans_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of all processes, for each run."""
    first_bytes_s: list[float] = field(default_factory=list)
    """Seconds after the decision, for each run of our own strategies."""

    @property
    def name(self) -> str:
        return (
            f"{self.strategy}@racks-{'-'.join(map(str, self.racks))}"
            if self.racks
            else (self.strategy)
        )

    @property
    def makespan_s(self) -> float:
        return median(self.makespans_s)

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.limit_s

    def cpu_s_per_gb(self, nbytes: int) -> float:
        """Processor time for each 10^9 bytes that a node received, checked and relayed, of a model
        of `nbytes`: all processes' time over the bytes of all copies."""
        return median(self.cpu_s) / ((self.n - 1) * nbytes / 1e9)


@dataclass(frozen=True, slots=True)
class Results:
    settings: Settings
    nbytes: int
    """Bytes of the model that was moved."""
    rows: tuple[Row, ...]


def measure(settings: Settings, say: Callable[[str], None]) -> Results:
    """Runs the benchmark. ConfigError: this machine cannot have a testbed. BenchFailed, PeerFailed:
    a run went wrong."""
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        make_checkpoint(checkpoint, checkpoint_spec(settings.nbytes, settings.blocks))
        rows: list[Row] = []
        flat = Wiring(hosts=max(settings.nodes), link_mbit=settings.link_mbit)
        nbytes = _measure_on(flat, settings.nodes, settings, Path(folder), rows, say)
        if settings.racks:
            racks = Wiring(
                hosts=sum(settings.racks),
                link_mbit=settings.link_mbit,
                racks=settings.racks,
                trunk_mbit=settings.trunk_mbit,
            )
            _measure_on(racks, (racks.hosts,), settings, Path(folder), rows, say)
    return Results(settings, nbytes, tuple(rows))


def _measure_on(
    wiring: Wiring,
    counts: Sequence[int],
    settings: Settings,
    folder: Path,
    rows: list[Row],
    say: Callable[[str], None],
) -> int:
    """Adds the rows, and returns the model's bytes."""
    with Testbed(wiring) as testbed, testbed.hub.entered():
        return uvloop.run(_Bench(testbed, settings, folder, rows, say).run(counts))


class _Bench:
    def __init__(
        self,
        testbed: Testbed,
        settings: Settings,
        folder: Path,
        rows: list[Row],
        say: Callable[[str], None],
    ) -> None:
        self._testbed = testbed
        self._settings = settings
        self._folder = folder
        self._rows = rows
        self._say = say

    async def run(self, counts: Sequence[int]) -> int:
        settings, wiring = self._settings, self._testbed.wiring
        name = f"racks-{'-'.join(map(str, wiring.racks))}" if wiring.racks else "flat"
        async with Nodes(self._testbed, self._folder / name, settings.nbytes) as nodes:
            await nodes.start(min(counts))
            record = await nodes.load(self._folder / "checkpoint", settings.blocks)
            for count in sorted(counts):
                self._say(f"starting {count} nodes")
                await nodes.start(count)
                await self._ours(nodes, record, count)
                if settings.peers and not wiring.racks:
                    await self._peers(record, count)
        return record.nbytes

    async def _ours(self, nodes: Nodes, record: ModelRecord, count: int) -> None:
        wiring, settings = self._testbed.wiring, self._settings
        task = self._task(record, count)
        limit_s = record.nbytes / goodput(wiring.link_mbit)
        bound_s = 0.0
        if wiring.racks:
            bound_s = limit_s * STRATEGIES["taps"](task).steps / record.n_blocks
        planned: list[tuple[Row, Choice]] = []
        for strategy in settings.strategies:
            choice = choose(task, Serving(PlannerConfig().max_stages), name=strategy)
            chosen = choice.strategy if strategy == AUTO else ""
            row = Row(count, strategy, limit_s, wiring.racks, bound_s, chosen)
            planned.append((row, choice))
        # Not counted: the first run makes the connections that later runs find in the pool.
        await nodes.multicast(record, planned[0][1].moves(record.n_blocks), PATIENCE * limit_s)
        for number in range(settings.runs):
            self._say(f"{count} nodes, run {number + 1} of {settings.runs}")
            for row, choice in planned:
                await asyncio.sleep(SETTLE_S)
                run = await nodes.multicast(
                    record, choice.moves(record.n_blocks), PATIENCE * limit_s
                )
                row.makespans_s.append(run.makespan_s)
                row.cpu_s.append(run.cpu_s)
                row.first_bytes_s.append(run.first_byte_s)
                self._say(f"  {row.name:<12} {run.makespan_s / limit_s:.3f} x limit")
        self._rows += (row for row, _ in planned)

    async def _peers(self, record: ModelRecord, count: int) -> None:
        self._say(f"{count} nodes, gloo")
        limit_s = record.nbytes / goodput(self._testbed.wiring.link_mbit)
        runs = await asyncio.to_thread(
            run_peers, self._testbed, count, record.nbytes, self._settings.runs
        )
        for mode in dict.fromkeys(run.mode for run in runs):
            row = Row(count, mode, limit_s)
            for run in runs:
                if run.mode == mode:
                    row.makespans_s.append(run.makespan_s)
                    row.cpu_s.append(run.cpu_s)
            self._rows.append(row)

    def _task(self, record: ModelRecord, count: int) -> Task:
        """The task as the planner knows it, for nodes that state the rate of their links."""
        wiring = self._testbed.wiring
        rate, trunk = wiring.link_mbit * 1e6 / 8, wiring.trunk_mbit * 1e6 / 8
        racks = [f"rack {wiring.rack_of(n)}" if wiring.racks else "" for n in range(count)]
        ports = tuple(Port(rate, rate, rack) for rack in racks)
        trunks = dict.fromkeys(filter(None, racks), trunk)
        fabric = Fabric(ports, PlannerConfig().step_overhead_s, trunks)
        return Task(fabric, record.block_bytes, (0,), record.chunk_bytes)


def document(results: Results) -> dict[str, object]:
    """The results as `--json` prints them."""
    return {
        "rows": [
            {
                "n": row.n,
                "strategy": row.name,
                "makespan_s": round(row.makespan_s, 4),
                "limit_s": round(row.limit_s, 4),
                "ratio": round(row.ratio, 4),
                "cpu_s_per_gb": round(row.cpu_s_per_gb(results.nbytes), 3),
                "runs": len(row.makespans_s),
            }
            for row in results.rows
        ],
        "link_mbit": results.settings.link_mbit,
        "bytes": results.nbytes,
    }


def table(results: Results) -> Iterator[str]:
    """The results for people."""
    settings = results.settings
    yield (
        f"{results.nbytes / (1 << 20):.1f} MiB in {settings.blocks} blocks from one node to all, "
        f"links of {settings.link_mbit:g} Mbit/s; medians of {settings.runs}"
    )
    header = f"{'nodes':>5}  {'strategy':<26} {'makespan':>9} {'x limit':>8}  {'spread':>13}"
    yield f"{header} {'CPU':>7} {'a GB':>6} {'cores':>6} {'1st byte':>9}"
    before = 0
    for row in results.rows:
        if before and row.n != before:
            yield ""
        before = row.n
        name = row.name + (f" ({row.chosen})" if row.chosen else "")
        spread = f"{min(row.makespans_s):.3f}-{max(row.makespans_s):.3f}"
        cpu_s = median(row.cpu_s)
        first = f"{median(row.first_bytes_s) * 1e3:6.1f} ms" if row.first_bytes_s else ""
        yield (
            f"{row.n:>5}  {name:<26} {row.makespan_s:>7.3f} s {row.ratio:>8.3f}  {spread:>13} "
            f"{cpu_s:>5.2f} s {row.cpu_s_per_gb(results.nbytes):>6.2f} "
            f"{cpu_s / row.makespan_s:>6.2f} {first:>9}"
        )
