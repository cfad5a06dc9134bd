"""Prefill and decode together or apart, in virtual time.

Run: `.venv/bin/python -m benchmarks.roles`, five minutes. The real services run on modelled
hardware: Llama-2-13B on H800 devices with links of 400 Gbit/s, each of which holds one replica. All
replicas are there from the beginning. Requests arrive at random (Poisson), at a rate that keeps the
replicas busy. A request is good if it keeps both objectives: TTFT, and its mean time between
tokens (DistServe, OSDI 2024, section 2.3). What is apart is so by
`model set --prefill-share`; `chosen` is its value `auto`: the planner chooses, by the objectives.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from shared import telemetry
from shared.config import TelemetryConfig
from shared.messages.pool import PLANNERS_CHOICE
from simulation import systems
from simulation.cluster import ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.results import RequestResult
from simulation.run import CHUNKS, run_cluster
from simulation.synthetic import synthesize
from simulation.traces import Row

ARCHITECTURE, HARDWARE, NODES, SLOTS = "llama-2-13b", "h800-400g", 8, 64
SHARES = 0.0, 0.375, 0.5, PLANNERS_CHOICE
TTFT_S = 2.0
OURS = systems.named("lambdascale")


@dataclass(frozen=True, slots=True)
class Load:
    prompt: int
    output: int
    rates: tuple[float, ...]
    """Requests a second."""
    tpot_s: float
    """The objective."""


LOADS = (
    Load(3072, 64, (12.0, 18.0, 24.0), 0.020),
    Load(2048, 128, (16.0, 24.0, 28.0), 0.020),
    Load(2048, 128, (16.0, 24.0, 28.0), 0.100),
    Load(512, 256, (32.0, 48.0, 64.0), 0.020),
)


def simulate(
    load: Load, rate: float, share: float, seed: int, seconds: float
) -> list[RequestResult]:
    text = f"poisson:rate={rate},seconds={seconds},prompt={load.prompt},output={load.output}"
    rows = [
        Row(r.arrival_s, r.prompt_tokens, r.output_tokens, "m")
        for r in synthesize(text, seed=seed).rows
    ]
    spec = ClusterSpec(
        system=replace(OURS, routing=replace(OURS.routing, refuses=False)),
        hardware=hardware(HARDWARE),
        models=(model(ARCHITECTURE, "m"),),
        nodes=NODES,
        chunks=CHUNKS,
        slots=SLOTS,
        kv_moves="always" if share else "never",
        min_instances=NODES,
        prefill_share=share,
        objectives=(("m", TTFT_S, load.tpot_s),) if share == PLANNERS_CHOICE else (),
        checked=False,
    )
    return list(run_cluster(spec, rows, seed).requests)


def at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _named(share: float) -> str:
    return "chosen" if share == PLANNERS_CHOICE else f"{share:g}" if share else "both"


def good(requests: Sequence[RequestResult], load: Load) -> float:
    kept = sum(
        r.completed and (r.ttft_s or 0) <= TTFT_S and (r.tpot_s or 0) <= load.tpot_s
        for r in requests
    )
    return kept / len(requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    print(f"{NODES} replicas; TTFT objective {TTFT_S:g} s; medians of {args.seeds} seeds")
    print("prompt output  rate  TPOT obj.  prefill   TTFT p50    p90  TPOT p50    p99   good  lost")
    for load in LOADS:
        for rate in load.rates:
            for share in SHARES:
                runs = [
                    simulate(load, rate, share, seed, args.seconds) for seed in range(args.seeds)
                ]
                ttft = [[r.ttft_s for r in run if r.ttft_s is not None] for run in runs]
                tpot = [[r.tpot_s for r in run if r.tpot_s is not None] for run in runs]
                figures = [
                    median(at(found, part) for found in what) * 1e3
                    for what, part in ((ttft, 0.5), (ttft, 0.9), (tpot, 0.5), (tpot, 0.99))
                ]
                lost = sum(not r.completed for run in runs for r in run)
                print(
                    f"{load.prompt:6} {load.output:6} {rate:5.0f} {load.tpot_s * 1e3:7.0f} ms "
                    f"{_named(share):>8} {figures[0]:8.0f} ms {figures[1]:6.0f} "
                    f"{figures[2]:6.1f} ms {figures[3]:6.1f} "
                    f"{median(good(run, load) for run in runs):6.1%} {lost:5}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
