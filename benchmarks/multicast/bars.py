"""The bars for the data plane, and whether a run of the benchmark meets them."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.multicast.bench import OURS, Results, Row
from benchmarks.multicast.peers import BROADCAST, CHAIN
from services.planner.core.choose import AUTO

TO_LIMIT = {8: 1.05, 16: 1.10}
GROWTH = 1.05
REGRET = 0.03
OVER_BROADCAST = {8: 2.8, 16: 3.8}
OVER_TREE = 1.9
CHAIN_FROM = 4
TO_TAP_BOUND = 1.10
FIRST_BYTE_S = 0.020


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    met: bool

    def __str__(self) -> str:
        return f"{'met    ' if self.met else 'NOT MET'}  {self.what}"


def bars(results: Results) -> list[Bar]:
    """The bars for which there are measured rows."""
    return list(_bars({(row.n, row.name): row for row in results.rows}))


def _bars(rows: dict[tuple[int, str], Row]) -> Iterator[Bar]:
    auto = {n: row for (n, name), row in rows.items() if name == AUTO}
    for n, most in TO_LIMIT.items():
        if n in auto:
            yield _at_most(f"{n} nodes: makespan over the limit", auto[n].ratio, most)
    if 4 in auto and 16 in auto:
        growth = auto[16].makespan_s / auto[4].makespan_s
        yield _at_most("flat in N: T(16) / T(4)", growth, GROWTH)
    yield from _against_ours(rows)
    for n, row in auto.items():
        if (peer := rows.get((n, BROADCAST))) and n in OVER_BROADCAST:
            faster = peer.makespan_s / row.makespan_s
            yield _at_least(f"{n} nodes: faster than {BROADCAST}", faster, OVER_BROADCAST[n])
        if (peer := rows.get((n, CHAIN))) and n >= CHAIN_FROM:
            faster = peer.makespan_s / row.makespan_s
            yield Bar(f"{n} nodes: faster than {CHAIN}: {faster:.3f} x", faster > 1)
        if (tree := rows.get((n, "tree"))) and n >= CHAIN_FROM:
            faster = tree.makespan_s / row.makespan_s
            yield _at_least(f"{n} nodes: faster than the binary tree", faster, OVER_TREE)
    for n, row in auto.items():
        first = median(row.first_bytes_s)
        what = f"{n} nodes: decision to first byte: {first * 1e3:.1f} ms, under "
        yield Bar(f"{what}{FIRST_BYTE_S * 1e3:.0f}", first < FIRST_BYTE_S)


def _against_ours(rows: dict[tuple[int, str], Row]) -> Iterator[Bar]:
    for row in rows.values():
        if row.strategy != AUTO:
            continue
        others = [r for r in rows.values() if (r.n, r.racks) == (row.n, row.racks)]
        best = min((r for r in others if r.strategy in OURS), key=lambda r: r.makespan_s)
        regret = row.makespan_s / best.makespan_s
        where = f"{row.n} nodes" + (" in racks" if row.racks else "")
        yield _at_most(
            f"{where}: {AUTO} over the best of ours ({best.strategy})", regret, 1 + REGRET
        )
        if row.racks:
            over = row.makespan_s / row.bound_s
            yield _at_most(f"{where}: makespan over the tap bound", over, TO_TAP_BOUND)


def _at_most(what: str, value: float, most: float) -> Bar:
    return Bar(f"{what}: {value:.3f}, at most {most:.2f}", value <= most)


def _at_least(what: str, value: float, least: float) -> Bar:
    return Bar(f"{what}: {value:.2f} x, at least {least:.1f}", value >= least)
