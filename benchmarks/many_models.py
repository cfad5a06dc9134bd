"""A hundred models on eight nodes, in virtual time: who waits, how long, and whether any starves.

Run: `.venv/bin/python -m benchmarks.many_models`, two minutes. The real services run on modelled
hardware (H800, 400 Gbit/s). Each node has memory for two copies of Llama-3.1-8B, so 16 of the 100
models fit at once. Requests come at random (Poisson), their models by Zipf's law, and no model
keeps an instance when it is idle. A *swap* is a request whose model had to be loaded first. It is
held against the time that it takes to read the model's bytes from a node's disk, and to prefill.
At 4 requests a second more models are active at once than have room, so that they take turns.
"""

import sys
from collections import defaultdict

from benchmarks.no_options import describe
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

MODELS, NODES = 100, 8
ARCHITECTURE, HARDWARE = "llama-3.1-8b", "h800-400g"
PROMPT = 256
WARM_S = 1.0
"""A first token that comes sooner needed no load."""
BAR = 1.1
RATES = (1.0, 2.0, 4.0)
"""Requests a second, over all models."""


def workload(rate: float, seconds: float) -> tuple[ClusterSpec, Setting]:
    made = synthesize(
        f"poisson:rate={rate},seconds={seconds},models={MODELS},skew=1,prompt={PROMPT},output=64"
    )
    setting = Setting(
        trace=made.rows,
        models=tuple((name, ARCHITECTURE) for name in made.models),
        nodes=NODES,
        hardware=HARDWARE,
        seed=0,
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


def at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def starved(requests: tuple[RequestResult, ...]) -> int:
    """Models of which no request was answered."""
    answered: dict[str, bool] = defaultdict(bool)
    for request in requests:
        answered[request.model] |= request.completed
    return sum(not each for each in answered.values())


def main() -> int:
    describe("many_models", __doc__)
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    limit, met = limit_s(), True
    print(f"{MODELS} models on {NODES} nodes; a swap takes at least {limit:.2f} s")
    heads = ("req/s", "requests", "lost", "starved", "swaps", "p50", "p90", "p99", "p99/limit")
    print("  ".join(f"{head:>9}" for head in heads))
    for rate in RATES:
        spec, setting = workload(rate, 100.0)
        requests = run_cluster(spec, setting.trace, setting.seed).requests
        swaps = sorted(r.ttft_s for r in requests if r.ttft_s is not None and r.ttft_s > WARM_S)
        lost, none = sum(not r.completed for r in requests), starved(requests)
        ratio = at(swaps, 0.99) / limit
        met = met and not lost and not none and ratio <= BAR
        figures = (*(at(swaps, share) for share in (0.5, 0.9, 0.99)), ratio)
        counts = (len(requests), lost, none, len(swaps))
        cells = [f"{rate:9.1f}", *(f"{n:9d}" for n in counts), *(f"{x:9.2f}" for x in figures)]
        print("  ".join(cells))
    verdict = "met" if met else "NOT met"
    print(f"bar: nothing lost, nobody starves, p99 of swaps <= {BAR} x the limit: {verdict}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
