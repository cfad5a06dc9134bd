"""The measures that systems are compared by: latencies, the share of requests served in time, and
cost."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simulation.results import RequestResult, Sample, SystemRun

PERCENTILES = (50, 90, 99)
REFERENCE = "lambdascale"
"""The system that the others are compared with."""


@dataclass(frozen=True, slots=True)
class Objective:
    """The time that a request may take, in seconds: the SLO, which can depend on its length."""

    ttft_s: Callable[[RequestResult], float]
    tpot_s: Callable[[RequestResult], float]
    words: str

    def met(self, request: RequestResult) -> bool:
        """Whether the request kept it. A request that did not complete did not. A single token has
        no time per token."""
        if not request.completed or request.ttft_s is None:
            return False
        in_time = request.ttft_s <= self.ttft_s(request)
        return in_time and (request.tpot_s is None or request.tpot_s <= self.tpot_s(request))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In milliseconds, over the requests that have the value. None: no request has it."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Measures:
    requests: int
    completed: int
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    slo_attainment: float
    """The share of all requests, failed ones included."""
    gpu_seconds: float
    """Nodes with device memory set aside, integrated over the same time for all compared
    systems."""
    host_cache_gb_mean: float
    """Copies of models in host memory, in 10^9 bytes over all nodes, mean over time."""
    scale_events: int
    errors: dict[str, int]
    """How often each error occurred."""
    gpus_most: int
    scale_ms: Percentiles
    """From a scaling event's decision until its last node is complete."""
    first_path_ms: Percentiles
    """From a scaling event's decision until something new can serve."""
    bytes_moved: float
    tokens: int
    virtual_s: float
    wall_s: float
    """The cost of the simulation itself: this time, CPU time, and memory at its peak."""
    cpu_s: float
    peak_gb: float


def measure_all(runs: Mapping[str, SystemRun], objective: Objective) -> dict[str, Measures]:
    """Measures every run. Costs are counted until the end of the longest run. So a system that
    still works off a backlog pays for that, and a system that finished before pays for what it goes
    on holding."""
    end_s = max((run.virtual_s for run in runs.values()), default=0.0)
    return {system: measure(run, objective, end_s) for system, run in runs.items()}


def measure(run: SystemRun, objective: Objective, end_s: float) -> Measures:
    """`end_s`: the time until which costs are counted; not before the run's end."""
    requests, events = run.requests, run.events
    met = sum(map(objective.met, requests))
    return Measures(
        requests=len(requests),
        completed=sum(request.completed for request in requests),
        ttft_ms=percentiles(request.ttft_s for request in requests),
        tpot_ms=percentiles(request.tpot_s for request in requests),
        slo_attainment=met / len(requests) if requests else 0.0,
        gpu_seconds=integral(run, lambda sample: sample.gpus, end_s),
        host_cache_gb_mean=integral(run, lambda sample: sample.host_bytes, end_s)
        / max(end_s, 1e-9)
        / 1e9,
        scale_events=len(events),
        errors=dict(Counter(request.error for request in requests if request.error)),
        gpus_most=max((sample.gpus for sample in run.samples), default=0),
        scale_ms=percentiles(_after(event.decided_s, event.all_complete_s) for event in events),
        first_path_ms=percentiles(_after(event.decided_s, event.first_path_s) for event in events),
        bytes_moved=sum(event.bytes_moved for event in events),
        tokens=sum(request.tokens for request in requests),
        virtual_s=run.virtual_s,
        wall_s=run.wall_s,
        cpu_s=run.cpu_s,
        peak_gb=run.peak_bytes / 1e9,
    )


def _after(start: float, end: float | None) -> float | None:
    return None if end is None else end - start


def percentiles(seconds: Iterable[float | None]) -> Percentiles:
    known = [value for value in seconds if value is not None]
    if not known:
        return Percentiles(None, None, None)
    p50, p90, p99 = (float(value) * 1000 for value in np.percentile(known, PERCENTILES))
    return Percentiles(p50, p90, p99)


def integral(run: SystemRun, value: Callable[[Sample], float], end_s: float) -> float:
    """From 0 to `end_s`. A sample holds until the next sample, the last one until the end."""
    return cumulative(run, value, end_s)[1][-1]


def cumulative(
    run: SystemRun, value: Callable[[Sample], float], end_s: float
) -> tuple[list[float], list[float]]:
    """(times, the integral until then), at every sample and at the end."""
    at = [sample.at_s for sample in run.samples] + [end_s]
    totals = [0.0]
    for sample, (start, end) in zip(run.samples, pairwise(at), strict=True):
        totals.append(totals[-1] + value(sample) * max(0.0, end - start))
    return at, totals


# --- against the reference --------------------------------------------------

RATIOS: Mapping[str, Callable[[Measures], float | None]] = {
    "TTFT p50": lambda measures: measures.ttft_ms.p50,
    "TTFT p90": lambda measures: measures.ttft_ms.p90,
    "TTFT p99": lambda measures: measures.ttft_ms.p99,
    "TPOT p90": lambda measures: measures.tpot_ms.p90,
    "GPU time": lambda measures: measures.gpu_seconds,
    "host cache": lambda measures: measures.host_cache_gb_mean,
}
"""Measures of which less is better."""


def ratios(systems: Mapping[str, Measures]) -> dict[str, dict[str, float | None]]:
    """Each system's values as multiples of the reference's. Empty if there is no reference.

    None where a value is missing, or where the reference's is 0 or missing.
    """
    base = systems.get(REFERENCE)
    if base is None:
        return {}
    return {
        system: {name: _ratio(value(measures), value(base)) for name, value in RATIOS.items()}
        for system, measures in systems.items()
    }


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


# --- over time --------------------------------------------------------------


def steepest_burst(requests: Sequence[RequestResult], window_s: float = 10.0) -> float:
    """The start of the window that asks for the most more tokens than the window before."""
    if not requests:
        return 0.0
    bins: Counter[int] = Counter()
    for request in requests:
        bins[int(request.arrival_s / window_s)] += request.prompt_tokens + request.output_tokens
    rises = {later: bins[later] - bins[later - 1] for later in list(bins)}
    return max(rises, key=lambda later: (rises[later], -later)) * window_s
