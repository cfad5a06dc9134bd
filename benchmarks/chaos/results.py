"""What the runs say: as a table, as a document, and held against the bars."""

from collections.abc import Iterator
from statistics import quantiles
from typing import Any

from benchmarks.chaos.bench import Results, Run
from benchmarks.chaos.client import End
from benchmarks.chaos.faults import Kind
from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar

STALL_S = 1.5
GAP_S = 2.0
SILENCE_S = {"node": 2.0, "planner": 3.0, "registry": 3.0}


def stalls(results: Results, role: str, kind: Kind) -> list[float]:
    return [
        stall
        for run in results.runs
        for fault, seconds in run.stalls_s.items()
        if fault.role == role and fault.kind is kind
        for stall in seconds
    ]


def silences(results: Results, role: str, kind: Kind) -> list[float]:
    return [
        seconds
        for run in results.runs
        for fault, seconds in run.silences_s.items()
        if fault.role == role and fault.kind is kind
    ]


def bars(results: Results) -> Iterator[Bar]:
    runs = results.runs
    for end in (End.WRONG, End.LOST):
        count = sum(run.count(end) for run in runs)
        yield Bar(f"requests {end.value}: {count} (bar 0)", count == 0)
    hung = sum(run.hung for run in runs)
    yield Bar(f"requests hung: {hung} (bar 0)", hung == 0)
    ill = sum(run.well_s is None for run in runs)
    yield Bar(f"runs after which the cluster did not get well: {ill} (bar 0)", ill == 0)
    if found := stalls(results, "node", Kind.KILL):
        yield _most("stall of a stream when a node is killed, p99", p99(found), STALL_S)
    if gaps := [gap for run in runs for gap in run.gaps_s]:
        what = "longest gap of a stream when half of the nodes are taken away after a notice"
        yield _most(what, max(gaps), GAP_S)
    for role, most in SILENCE_S.items():
        if found := silences(results, role, Kind.KILL):
            yield _most(f"no block arrives after a {role} is killed, worst", max(found), most)


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _most(what: str, seconds: float, most: float) -> Bar:
    return Bar(f"{what}: {seconds:.2f} s (bar {most:g} s)", seconds <= most)


def table(results: Results) -> Iterator[str]:
    """The results for people."""
    runs = results.runs
    answers = [answer for run in runs for answer in run.answers]
    ends = ", ".join(f"{sum(run.count(end) for run in runs)} {end.value}" for end in End)
    yield machine()
    yield (
        f"{len(runs)} runs from seed {results.settings.seed} on: {len(answers)} requests, {ends}, "
        f"{sum(run.hung for run in runs)} hung; "
        f"{sum(answer.tries > 1 for answer in answers)} came again"
    )
    yield f"{'':26}faults  {'stream stalls p50, p99, most':>30}  {'no block arrives':>20}"
    for role in sorted({fault.role for run in runs for fault in run.faults}):
        for kind in Kind:
            yield from _row(results, role, kind)
    times = sorted(run.well_s for run in runs if run.well_s is not None)
    if times:
        middle = times[len(times) // 2]
        yield f"well again after the last answer: {middle:.1f} s (median), {times[-1]:.1f} s (most)"
    for run in runs:
        if not run.is_good:
            yield from _bad(run)


def _row(results: Results, role: str, kind: Kind) -> Iterator[str]:
    count = sum(
        fault.role == role and fault.kind is kind for run in results.runs for fault in run.faults
    )
    if not count:
        return
    found = sorted(stalls(results, role, kind))
    gaps = f"{found[len(found) // 2]:.2f}, {p99(found):.2f}, {found[-1]:.2f} s" if found else "-"
    quiet = sorted(silences(results, role, kind))
    still = f"{quiet[len(quiet) // 2]:.2f}, {quiet[-1]:.2f} s" if quiet else "-"
    yield f"{role:10}{kind.value:16}{count:>6}  {gaps:>30}  {still:>20}"


def _bad(run: Run) -> Iterator[str]:
    yield f"seed {run.seed}: {'; '.join(map(str, run.faults))}"
    for answer in run.answers:
        hung = run.hung_times(answer)
        if answer.end in (End.WRONG, End.LOST) or hung:
            end = f"{answer.end.value}, {hung} times hung, after {answer.tries} tries"
            yield f"  {answer.request.key} {end}: {answer.said[:300]}"


def document(results: Results) -> dict[str, Any]:
    return {
        "machine": machine(),
        "without": results.without,
        "runs": [
            {
                "seed": run.seed,
                "faults": [
                    {
                        "at_s": round(fault.at_s, 3),
                        "kind": fault.kind.name.lower(),
                        "process": fault.process,
                        "for_s": fault.for_s,
                        "stalls_s": [round(s, 3) for s in run.stalls_s.get(fault, [])],
                        "silence_s": run.silences_s.get(fault),
                    }
                    for fault in run.faults
                ],
                "requests": {end.name.lower(): run.count(end) for end in End},
                "hung": run.hung,
                "gaps_s": [round(gap, 3) for gap in run.gaps_s],
                "well_s": run.well_s,
            }
            for run in results.runs
        ],
    }
