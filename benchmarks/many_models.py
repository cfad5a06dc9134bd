"""A hundred models on eight nodes, in virtual time: who waits, how long, and whether any starves.

Run: `.venv/bin/python -m benchmarks.many_models [--seeds N]`, two minutes a seed. The real services
run on modelled hardware (H800, 400 Gbit/s). Each node has memory for two copies of Llama-3.1-8B, so
16 of the 100 models fit at once. Requests come at random (Poisson), their models by Zipf's law, and
no model keeps an instance when it is idle. A *swap* is a request whose model had to be loaded
first. It is held against the time that it takes to read the model's bytes from a node's disk, and
to prefill.

Beside it (`in order`) stands a queue in which all eight disks read one model after the other, at
their full rate and in the order in which the models are asked for, into memory for 16 models, of
which the one goes that was not used for longest. At 4 requests a second that queue is long, too.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from shared import telemetry
from shared.config import TelemetryConfig
from simulation.capacity import Capacity
from simulation.cluster import ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.results import RequestResult
from simulation.run import run_cluster, spec_of
from simulation.setting import Setting
from simulation.synthetic import synthesize
from simulation.traces import Row

MODELS, NODES = 100, 8
ARCHITECTURE, HARDWARE = "llama-3.1-8b", "h800-400g"
PROMPT = 256
WARM_S = 0.1
"""A first token that comes sooner needed no load: the fastest takes 0.3 s, from a host's memory."""
BAR = 1.1
RATES = (1.0, 2.0, 4.0)
"""Requests a second, over all models."""


def workload(rate: float, seconds: float, seed: int) -> tuple[ClusterSpec, Setting]:
    made = synthesize(
        f"poisson:rate={rate},seconds={seconds},models={MODELS},skew=1,prompt={PROMPT},output=64",
        seed=seed,
    )
    setting = Setting(
        trace=made.rows,
        models=tuple((name, ARCHITECTURE) for name in made.models),
        nodes=NODES,
        hardware=HARDWARE,
        seed=seed,
        racks=1,
        slots=16,
        min_instances=0,
        workload=made.name,
        synthetic=True,
        notes=made.notes,
    )
    return spec_of("lambdascale", setting), setting


def limit_s() -> float:
    """Seconds to read a model from disk, and to prefill."""
    on, of = hardware(HARDWARE), model(ARCHITECTURE)
    return of.nbytes / on.ssd_bytes_per_s + Capacity(of, on, slots=16).prefill_s(PROMPT)


def in_order_s(rows: Sequence[Row]) -> list[float]:
    """How long requests wait for loads if all disks read one model after the other."""
    on, of = hardware(HARDWARE), model(ARCHITECTURE)
    load_s, room = of.nbytes / (NODES * on.ssd_bytes_per_s), 2 * NODES
    prefill_s = Capacity(of, on, slots=16).prefill_s(PROMPT)
    free_at, there_at, used_at = 0.0, dict[str, float](), dict[str, float]()
    waits = []
    for row in rows:
        if row.model not in there_at:
            if len(there_at) == room:
                del there_at[min(there_at, key=lambda name: used_at[name])]
            free_at = there_at[row.model] = max(row.arrival_s, free_at) + load_s
        used_at[row.model] = max(row.arrival_s, there_at[row.model])
        waits.append(used_at[row.model] - row.arrival_s + prefill_s)
    return [wait for wait in waits if wait > WARM_S]


def at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def starved(requests: tuple[RequestResult, ...]) -> int:
    """Models of which no request was answered."""
    answered: dict[str, bool] = defaultdict(bool)
    for request in requests:
        answered[request.model] |= request.completed
    return sum(not each for each in answered.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    seeds = range(parser.parse_args(argv).seeds)
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    limit, met = limit_s(), True
    print(f"{MODELS} models on {NODES} nodes; a swap takes at least {limit:.2f} s")
    heads = ("req/s", "seed", "requests", "lost", "starved", "swaps")
    print("  ".join(f"{head:>8}" for head in (*heads, "p50", "p90", "p99", "p99/lim.", "in order")))
    for rate in RATES:
        ratios = []
        for seed in seeds:
            spec, setting = workload(rate, 100.0, seed)
            requests = run_cluster(spec, setting.trace, setting.seed).requests
            swaps = sorted(r.ttft_s for r in requests if r.ttft_s is not None and r.ttft_s > WARM_S)
            lost, none = sum(not r.completed for r in requests), starved(requests)
            ratios.append(at(swaps, 0.99) / limit)
            met = met and not lost and not none
            counts = (seed, len(requests), lost, none, len(swaps))
            queued = at(sorted(in_order_s(setting.trace)), 0.99) / limit
            figures = (*(at(swaps, share) for share in (0.5, 0.9, 0.99)), ratios[-1], queued)
            cells = [f"{rate:8.1f}", *(f"{n:8d}" for n in counts), *(f"{x:8.2f}" for x in figures)]
            print("  ".join(cells), flush=True)
        met = met and median(ratios) <= BAR
    verdict = "met" if met else "NOT met"
    print(f"bar: nothing lost, nobody starves, p99 of swaps <= {BAR} x the limit: {verdict}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
