"""Made-up runs, shaped like the real thing, for what is reported about them."""

import random
from collections.abc import Sequence
from functools import cache

from simulation.results import EventResult, RequestResult, Sample, SystemRun
from simulation.setting import Setting
from simulation.systems import OWN
from simulation.traces import Row

LOAD_S = {
    "lambdascale": 0.9, "lambdapipe": 1.0, "serverlessllm": 11.0, "faasnet": 3.2, "nccl": 3.6,
    "blitzscale": 1.6, "allcache": 1.3, "ideal": 0.0,
}  # fmt: skip
STEP_S = 0.02
END_S = 600.0
BURSTS = ((60.0, 100.0, 4.0), (300.0, 330.0, 7.0), (420.0, 480.0, 2.5))


def setting(rows: Sequence[Row] | None = None) -> Setting:
    return Setting(
        trace=tuple(rows or arrivals()),
        models=(("llama-2-13b", "llama-2-13b"),),
        nodes=12,
        hardware="h800-400g",
        seed=0,
        racks=1,
        slots=32,
        min_instances=1,
        workload="bursts.csv",
        synthetic=False,
        notes=("rate scaled by 0.4 (so that the peak just fits)",),
    )


def arrivals() -> list[Row]:
    rng = random.Random(1)
    rows: list[Row] = []
    at = 0.0
    while at < END_S - 30:
        rate = next((rate for start, end, rate in BURSTS if start <= at < end), 0.2)
        at += rng.expovariate(rate)
        rows.append(Row(at, rng.randint(50, 2000), rng.randint(2, 300), "llama-2-13b"))
    return rows


@cache
def made_up(system: str) -> SystemRun:
    """As if each burst waited for the system's loading time, and was then served by 12 nodes."""
    rng, load = random.Random(2), LOAD_S[system.removesuffix(OWN)]
    requests: list[RequestResult] = []
    bins = [0] * int(END_S * 2)
    for row in arrivals():
        late = next(
            (max(0.0, start + load - row.arrival_s) for start, end, _ in BURSTS
             if start <= row.arrival_s < end), 0.0,
        )  # fmt: skip
        first = row.arrival_s + 0.08 * rng.uniform(0.8, 2.5) + late * rng.uniform(0.4, 1.0)
        last = first + (row.output_tokens - 1) * STEP_S
        requests.append(
            RequestResult(row.model, row.arrival_s, row.prompt_tokens, row.output_tokens,
                          row.output_tokens, first, last)
        )  # fmt: skip
        for token in range(row.output_tokens):
            bins[min(int((first + token * STEP_S) * 2), len(bins) - 1)] += 1
    return SystemRun(system, tuple(requests), *_scaling(system, load, rng), 0.5, tuple(bins),
                     END_S, 3.0)  # fmt: skip


def _scaling(
    system: str, load: float, rng: random.Random
) -> tuple[tuple[EventResult, ...], tuple[Sample, ...]]:
    events: list[EventResult] = []
    cached = 26e9 * (12 if system == "allcache" else 1)
    samples = [Sample(0.0, 1, 1, cached)]
    for start, end, rate in BURSTS:
        gpus = min(12, int(rate * 2))
        keep = 60.0 if system.startswith("serverlessllm") else 2.0
        events.append(
            EventResult("llama-2-13b", "complete", "binomial", 1, gpus - 1, start + 0.2,
                        start + 0.2 + load * 0.3, start + 0.2 + load * 0.9,
                        start + 0.2 + load * rng.uniform(1, 1.1), load, 26e9 * gpus)
        )  # fmt: skip
        samples.append(Sample(start + 0.2, gpus, 1, cached * 1.2))
        samples.append(Sample(start + 0.2 + load, gpus, gpus, cached * 1.5))
        samples.append(Sample(end + keep, 1, 1, cached))
    return tuple(events), tuple(samples)
