"""Two classes of models while there is too little memory for both, in virtual time.

Run: `.venv/bin/python -m benchmarks.priorities`, two minutes. The real services run on modelled
hardware (H800, 400 Gbit/s; each of 8 nodes has memory for one copy of Llama-2-13B). The model
`high` has priority 1 and an objective for TTFT. Its requests come in bursts (Gamma, CV 4) that
take most nodes. The requests of `low` (priority 0, Poisson) would fill all 8 nodes by themselves.
The requests of `high` are served once alone and once beside those of `low`.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from benchmarks.no_options import describe
from shared import telemetry
from shared.config import TelemetryConfig
from simulation import systems
from simulation.cluster import ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.results import RequestResult
from simulation.run import CHUNKS, run_cluster
from simulation.synthetic import synthesize
from simulation.traces import Row

HIGH, LOW = "high", "low"
ARCHITECTURE, HARDWARE, NODES = "llama-2-13b", "h800-400g", 8
SECONDS = 60.0
LOADS = {
    HIGH: "gamma:rate=12,cv=4,seconds={seconds},prompt=1024,output=128",
    LOW: "poisson:rate=40,seconds={seconds},prompt=1024,output=128",
}
OBJECTIVE_S = 1.0
SEEDS = range(3)
BAR = 1.1
STILL_S = 30.0
"""The longest time for which no request of the low class may end."""


def rows_of(name: str, seed: int, seconds: float) -> list[Row]:
    made = synthesize(LOADS[name].format(seconds=seconds), seed=seed)
    return [Row(r.arrival_s, r.prompt_tokens, r.output_tokens, name) for r in made.rows]


def cluster(names: Sequence[str]) -> ClusterSpec:
    return ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware(HARDWARE),
        models=tuple(model(ARCHITECTURE, name) for name in names),
        nodes=NODES,
        chunks=CHUNKS,
        slots=16,
        min_instances=1,
        objectives=((HIGH, OBJECTIVE_S, 0.0),),
        priorities=((HIGH, 1),),
        checked=False,
    )


def simulate(names: Sequence[str], seed: int, seconds: float) -> tuple[RequestResult, ...]:
    rows = [row for name in names for row in rows_of(name, seed, seconds)]
    rows.sort(key=lambda row: row.arrival_s)
    return run_cluster(cluster(names), rows, seed).requests


def ttfts(requests: Sequence[RequestResult], name: str) -> list[float]:
    return sorted(r.ttft_s for r in requests if r.model == name and r.ttft_s is not None)


def at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def still_s(requests: Sequence[RequestResult], name: str, seconds: float) -> float:
    """The longest time within the window in which no request of the model got its last token."""
    ends = (r.last_token_s for r in requests if r.model == name and r.last_token_s is not None)
    marks = [0.0, *sorted(end for end in ends if end < seconds), seconds]
    return max(later - earlier for earlier, later in pairwise(marks))


def main() -> int:
    describe("priorities", __doc__)
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    print(f"TTFT of {HIGH} in s, alone and beside {LOW}; objective {OBJECTIVE_S:g} s")
    heads = ("p90", "p99", "beside: p90", "p99", "ratio", "low ended", "low still s", "lost")
    print("  ".join(f"{head:>11}" for head in ("seed alone", *heads)))
    ratios, still, lost = list[float](), list[float](), 0
    for seed in SEEDS:
        alone = simulate((HIGH,), seed, SECONDS)
        both = simulate((HIGH, LOW), seed, SECONDS)
        tails = [[at(ttfts(run, HIGH), share) for share in (0.9, 0.99)] for run in (alone, both)]
        ratios.append(tails[1][1] / tails[0][1])
        still.append(still_s(both, LOW, SECONDS))
        lost += sum(not request.completed for request in (*alone, *both))
        ended = sum(
            r.model == LOW and r.last_token_s is not None and r.last_token_s < SECONDS for r in both
        )
        cells = [f"{value:11.2f}" for value in tails[0]]
        cells += [f"{value:11.2f}" for value in (*tails[1], ratios[-1])]
        print(
            "  ".join([f"{seed:>11}", *cells, f"{ended:11d}", f"{still[-1]:11.1f}", f"{lost:11d}"])
        )
    met = median(ratios) <= BAR and max(still) <= STILL_S and not lost
    print(f"medians: p99 {median(ratios):.2f} x alone; {LOW} stood still for {max(still):.1f} s")
    verdict = "met" if met else "NOT met"
    print(
        f"bar: p99 of {HIGH} <= {BAR} x alone, {LOW} never still for {STILL_S:g} s, "
        f"nothing lost: {verdict}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
