"""Bursts in virtual time: how long requests wait for their first token while a model loads.

Run: `.venv/bin/python -m benchmarks.burst`, 20 seconds. The real services run on modelled hardware,
beside the same services with λScale's fixed pipelines (`planner.serving=pipelines`).

`demo` is the quick start's burst: 56 requests at once and 64 more at 12 a second, five nodes with 8
slots, links and engines paced as `lambdascale demo` paces them. `a100` is Llama-2-13B on twelve
A100 nodes of 100 Gbit/s with 32 slots, one of which serves when 200 requests a second begin, for
4 s, each of 128 tokens in and 64 out.
"""

import math
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from benchmarks.no_options import describe
from shared import telemetry
from shared.config import TelemetryConfig
from simulation import systems
from simulation.cluster import ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.results import SystemRun
from simulation.run import CHUNKS, run_cluster
from simulation.traces import Row

START_S = 1.0
SHARES = (0.5, 0.9, 0.99)
BAR_DECISION_S = 0.06
"""From the first request that has to wait to the decision, where the whole burst is there at once.
The first byte follows within a few ms, on real links 20 to 35 ms."""


@dataclass(frozen=True)
class Scenario:
    name: str
    spec: ClusterSpec
    rows: tuple[Row, ...]
    bars: tuple[float, float, float]
    """TTFT p50, p90 and p99, in seconds."""
    at_once: bool
    """The burst begins with more than instances take."""


@dataclass(frozen=True)
class Figures:
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    decision_s: float
    """From the burst's begin to the first decision."""
    events: int


def demo() -> Scenario:
    steady = 64
    gaps = [-math.log(1 - (i + 0.5) / steady) / 12.0 for i in range(steady)]
    random.Random(0).shuffle(gaps)
    at, rows = START_S, []
    for gap in [0.0] * 56 + gaps:
        at += gap
        rows.append(Row(at, 13, 48, "demo"))
    spec = ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=msgspec.structs.replace(hardware("paced-laptop"), memory_bytes=120e6),
        models=(model("demo"),),
        nodes=5,
        chunks=CHUNKS,
        slots=8,
    )
    return Scenario("demo", spec, tuple(rows), (1.4, 2.2, 2.4), at_once=True)


def a100() -> Scenario:
    rng, rows, at = random.Random(1), list[Row](), START_S
    while at < START_S + 4.0:
        rows.append(Row(at, 128, 64, "llama-2-13b"))
        at += rng.expovariate(200)
    spec = ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware("a100-100g"),
        models=(model("llama-2-13b"),),
        nodes=12,
        chunks=CHUNKS,
        slots=32,
    )
    return Scenario("a100", spec, tuple(rows), (1.8, 2.8, 3.5), at_once=False)


def figures(run: SystemRun) -> Figures:
    ttft = sorted(r.ttft_s for r in run.requests if r.ttft_s is not None)
    tpot = sorted(r.tpot_s for r in run.requests if r.tpot_s)
    if len(ttft) < len(run.requests):
        raise SystemExit(f"{len(run.requests) - len(ttft)} requests got no token")
    growth = [event for event in run.events if event.targets]
    return Figures(
        tuple(_at(ttft, share) for share in SHARES),
        tuple(_at(tpot, share) for share in SHARES),
        min(event.decided_s for event in growth) - START_S,
        len(growth),
    )


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def serve(scenario: Scenario, serving: str) -> Figures:
    system = replace(scenario.spec.system, serving=serving)
    return figures(run_cluster(replace(scenario.spec, system=system), scenario.rows, seed=1))


def report(scenario: Scenario) -> bool:
    """Whether every bar is met."""
    ours, fixed = serve(scenario, "pools"), serve(scenario, "pipelines")
    print(f"{scenario.name}: {len(scenario.rows)} requests, {scenario.spec.nodes} nodes")
    print(f"  {'':<16}{'TTFT p50':>9}{'p90':>7}{'p99':>7}{'TPOT p50':>11}{'p90':>7}{'p99':>7}")
    for name, found in (("lambdascale", ours), ("fixed pipelines", fixed)):
        ttft = "".join(f"{value:7.2f}" for value in found.ttft)
        tpot = "".join(f"{value:7.3f}" for value in found.tpot)
        print(f"  {name:<16}  {ttft}    {tpot}   s; {found.events} events")
    ratio = [mine / theirs for mine, theirs in zip(ours.ttft, fixed.ttft, strict=True)]
    print("  ratio             " + "".join(f"{value:7.2f}" for value in ratio))
    met = [_bar(f"TTFT p{100 * s:g}", t, bar) for s, t, bar in _bars(scenario, ours)]
    met += [_bar("over fixed pipelines', each", max(ratio), 1.0)]
    if scenario.at_once:
        met += [_bar("burst to decision", ours.decision_s, BAR_DECISION_S)]
    print()
    return all(met)


def _bars(scenario: Scenario, found: Figures) -> list[tuple[float, float, float]]:
    return list(zip(SHARES, found.ttft, scenario.bars, strict=True))


def _bar(what: str, found: float, bar: float) -> bool:
    met = found <= bar
    print(f"  {what}: {found:.3f}, bar {bar:g}: {'met' if met else 'NOT MET'}")
    return met


def main() -> int:
    describe("burst", __doc__)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the same figures every time
        command = [sys.executable, "-m", "benchmarks.burst"]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    met = [report(scenario) for scenario in (demo(), a100())]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
