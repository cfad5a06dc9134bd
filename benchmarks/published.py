"""What the papers measured, beside what this project gives in the same setting, simulated.

Run: .venv/bin/python -m benchmarks.published [--traces DIR] [SECTION ...]. The real services run on
modelled H800 nodes with 400 Gbit/s each; the other systems are strategies of the same planner
(`lambdascale simulate --help`). `multicast` and `ramp` take a minute. `trace` and `split` need a
recorded trace and take several minutes each.
"""

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared import subjects, telemetry
from shared.config import TelemetryConfig
from shared.ids import ModelName
from shared.messages.pool import PLANNERS_CHOICE
from shared.messages.scaling import (
    EventRecord,
    EventState,
    PlannerQuery,
    PlannerState,
    ScaleAccepted,
    SetInstances,
)
from simulation import loop, systems
from simulation.capacity import Capacity
from simulation.cluster import Cluster, ClusterSpec
from simulation.fit import fitting_factor, scale_rate
from simulation.hardware import hardware
from simulation.measures import integral
from simulation.models import model
from simulation.results import SystemRun
from simulation.run import run_cluster
from simulation.traces import Row, clip, read_trace, served_by

MODEL, HARDWARE = "llama-2-13b", "h800-400g"
CHUNKS = 4
SLOTS = 16
TRACE, TRACE_S = "window_azure2023_code.csv", 600.0
SPLIT_S, SPLIT_TTFT_S, SPLIT_TPOT_S = 300.0, 2.0, 0.100
OTHERS = ("serverlessllm", "faasnet", "nccl", "blitzscale")


def cluster(system: str, nodes: int) -> ClusterSpec:
    return ClusterSpec(
        slots=SLOTS,
        system=systems.named(system),
        hardware=hardware(HARDWARE),
        models=(model(MODEL),),
        nodes=nodes,
        chunks=CHUNKS,
    )


# --- multicast: all nodes from one -----------------------------------------------------------


async def scale_out(spec: ClusterSpec) -> EventRecord:
    """Scales from one replica to one on every node of an idle cluster."""
    async with Cluster(spec) as running:
        await running.serving()
        await asyncio.sleep(5)
        order = SetInstances(name=ModelName(MODEL), instances=spec.nodes)
        await running.bus.request(subjects.PLANNER_SCALE, order, ScaleAccepted, timeout=5)
        while True:
            await asyncio.sleep(0.1)
            query = PlannerQuery(events=1)
            state = await running.bus.request(
                subjects.PLANNER_STATE, query, PlannerState, timeout=5
            )
            if state.events[0].state in (EventState.COMPLETE, EventState.FAILED):
                return state.events[0]


def multicast_s(strategy: str, nodes: int) -> tuple[float, float]:
    """(seconds as simulated, seconds as the planner predicted)."""
    system = replace(systems.named("lambdascale"), transfer=strategy)
    record = loop.run(scale_out(replace(cluster("lambdascale", nodes), system=system)))
    return record.actual.all_complete_s or 0.0, record.predicted.all_complete_s or 0.0


def multicast() -> None:
    nbytes, rate = model(MODEL).nbytes, hardware(HARDWARE).link_bytes_per_s
    print(f"Multicast of {MODEL} ({nbytes / 1e9:.1f} GB) from one node, seconds until all hold it")
    print(f"(one copy over one link: {nbytes / rate:.3f} s; predicted in brackets)")
    names = ("auto", "binomial", "chain", "tree", "broadcast")
    print("  nodes" + "".join(f"{name:>18}" for name in names))
    took: dict[tuple[str, int], float] = {}
    for nodes in (2, 4, 8, 12):
        row = ""
        for name in names:
            took[name, nodes], predicted = multicast_s(name, nodes)
            row += f"{took[name, nodes]:>9.3f} ({predicted:.3f})".rjust(18)
        print(f"  {nodes:>5}{row}")
    claim("8 nodes, seconds", "< 1", f"{took['auto', 8]:.2f}")
    tree, group = (took[name, 8] / took["auto", 8] for name in ("tree", "broadcast"))
    claim("8 nodes, over FaaSNet's tree", "1.82 x", f"{tree:.2f} x")
    claim("8 nodes, over NCCL with its group creation", "1.53 x", f"{group:.2f} x")
    bare = [took["broadcast", nodes] - 0.3 for nodes in (2, 12)]
    claim("NCCL without it, 2 and 12 ranks, seconds", "0.53", f"{bare[0]:.2f}, {bare[1]:.2f}")
    print()


# --- throughput while loading ----------------------------------------------------------------


def spike(rate: float, seconds: float, prompt: int, output: int) -> list[Row]:
    rng, rows, at = random.Random(1), list[Row](), 1.0
    while at < 1.0 + seconds:
        rows.append(Row(at, prompt, output, MODEL))
        at += rng.expovariate(rate)
    return rows


def reaches(run: SystemRun, share: float, start: float) -> float:
    """Seconds after `start` until the rate of tokens first reaches this share of its highest, in
    steps of a quarter of a second."""
    width = round(0.25 / run.token_bin_s)
    bins = run.tokens_by_bin
    rates = [sum(bins[i : i + width]) for i in range(len(bins) - width)]
    highest = max(rates)
    first = next(i for i, rate in enumerate(rates) if rate >= share * highest)
    return first * run.token_bin_s - start


def ramp() -> None:
    print(
        "Throughput ramp-up: 12 nodes, k of which serve when 400 requests/s begin (128 tokens in,"
    )
    print("64 out, for 4 s): seconds until a share of the highest rate of tokens; TTFT p50 and p90")
    names = ("lambdascale", "lambdapipe", "blitzscale", "faasnet", "nccl", "serverlessllm", "ideal")
    print("  k  system            25 %    50 %    90 %    TTFT p50    p90   loaded in s")
    p90: dict[tuple[str, int], float] = {}
    for k in (1, 2, 4):
        for name in names:
            spec = replace(cluster(name, 12), min_instances=k, slots=32)
            run = run_cluster(spec, spike(400, 4, 128, 64), seed=1)
            start = min(request.arrival_s for request in run.requests)
            times = "".join(f"{reaches(run, share, start):8.2f}" for share in (0.25, 0.5, 0.9))
            ttft = ttfts(run)
            p90[name, k] = ttft[int(len(ttft) * 0.9)]
            first = next((e for e in run.events if e.all_complete_s), None)
            took = first.all_complete_s - first.decided_s if first and first.all_complete_s else 0
            print(
                f"  {k}  {name:<14}{times}{ttft[len(ttft) // 2]:>12.2f}"
                f"{p90[name, k]:>7.2f}{took:>14.2f}"
            )
    for name in ("serverlessllm", "faasnet", "nccl"):
        times = ", ".join(f"{p90[name, k] / p90['lambdascale', k]:.2f} x" for k in (1, 2, 4))
        claim(f"TTFT p90 below {name}'s, k = 1, 2, 4", "2.4-5 x (on a trace)", times)
    print()


def ttfts(run: SystemRun) -> list[float]:
    return sorted(r.ttft_s for r in run.requests if r.ttft_s is not None)


# --- a recorded trace ------------------------------------------------------------------------


def recorded(section: str, folder: Path) -> Path | None:
    """The recorded trace. None: it is not there, which is said."""
    path = folder / TRACE
    if path.is_file():
        return path
    print(f"{section}: SKIPPED, there is no {path}: name its folder with --traces")
    return None


def rows_of(path: Path, seconds: float) -> tuple[list[Row], float]:
    """The first requests of a trace, with their rate fitted to 12 nodes; and the factor."""
    node = Capacity(model(MODEL), hardware(HARDWARE), SLOTS)
    workload = read_trace(path)
    workload = served_by(workload, dict.fromkeys((row.model for row in workload.rows), MODEL))
    workload = clip(workload, {MODEL: node.model.context})
    factor = fitting_factor(
        workload.rows, lambda row: node.work_s(row.prompt_tokens, row.output_tokens), 12
    )
    fitted = scale_rate(workload, factor, "fitted").rows
    return [row for row in fitted if row.arrival_s < seconds], factor


def trace(folder: Path) -> None:
    if (path := recorded("trace", folder)) is None:
        return
    rows, factor = rows_of(path, TRACE_S)
    print(f"{TRACE}, first {TRACE_S:g} s: {len(rows)} requests (rate x {factor:.2f}), 12 nodes")
    print("  system           TTFT p50     p90     p99   GPU s   host cache GB")
    found: dict[str, tuple[float, float, float]] = {}
    for name in ("lambdascale", *OTHERS, "allcache", "ideal"):
        run = run_cluster(cluster(name, 12), rows, seed=0)
        waits, end_s = ttfts(run), TRACE_S + 30
        p50, p90, p99 = (waits[int(len(waits) * share)] for share in (0.5, 0.9, 0.99))
        gpu_s = integral(run, lambda sample: sample.gpus, end_s)
        host_gb = integral(run, lambda sample: sample.host_bytes, end_s) / end_s / 1e9
        found[name] = p90, gpu_s, host_gb
        print(f"  {name:<14}{p50:>11.3f}{p90:>8.3f}{p99:>8.3f}{gpu_s:>8.0f}{host_gb:>16.1f}")
    ours = found["lambdascale"]
    better = [found[name][0] / ours[0] for name in OTHERS]
    saved = [100 * (1 - ours[1] / found[name][1]) for name in OTHERS]
    claim("TTFT p90 below the baselines'", "2.4-5 x", f"{min(better):.2f}-{max(better):.2f} x")
    claim("GPU time below the baselines'", "17.8-31.3 %", f"{min(saved):.1f}-{max(saved):.1f} %")
    gap = 100 * (ours[0] / found["ideal"][0] - 1), 100 * (ours[1] / found["ideal"][1] - 1)
    claim("gap to ideal: TTFT p90, GPU time", "4.3-18.6 %", f"{gap[0]:.1f} %, {gap[1]:.1f} %")
    copies = f"{ours[2] / (model(MODEL).nbytes / 1e9):.2f}"
    claim("host copies of the model, mean", "1", f"{copies} (the rest of the time it is in a GPU)")
    print()


# --- without autoscaling: prefill and decode on nodes that are always there -------------------


@dataclass(frozen=True, slots=True)
class Split:
    good: float
    """The share of the requests that keep both objectives."""
    ttft_p95_s: float
    tpot_p95_s: float
    gpu_s: float


def split_of(spec: ClusterSpec, rows: Sequence[Row], seconds: float) -> Split:
    run = run_cluster(spec, rows, seed=0)
    kept = sum(
        r.completed and (r.ttft_s or 0) <= SPLIT_TTFT_S and (r.tpot_s or 0) <= SPLIT_TPOT_S
        for r in run.requests
    )
    waits, paces = ttfts(run), sorted(r.tpot_s for r in run.requests if r.tpot_s is not None)
    p95, pace_p95 = (each[int(len(each) * 0.95)] for each in (waits, paces))
    gpu_s = integral(run, lambda sample: sample.gpus, seconds + 30)
    return Split(kept / len(run.requests), p95, pace_p95, gpu_s)


def split(folder: Path) -> None:
    if (path := recorded("split", folder)) is None:
        return
    rows, factor = rows_of(path, SPLIT_S)
    print(
        f"{TRACE}, first {SPLIT_S:g} s: {len(rows)} requests (rate x {factor:.2f}), 12 nodes; "
        f"good: TTFT <= {SPLIT_TTFT_S:g} s and TPOT <= {SPLIT_TPOT_S * 1e3:g} ms"
    )
    goals = ((MODEL, SPLIT_TTFT_S, SPLIT_TPOT_S),)
    ours = replace(cluster("lambdascale", 12), objectives=goals, kv_moves="always")
    fixed = replace(ours, min_instances=12, objectives=())
    specs = {
        "lambdascale, planner's choice": replace(ours, prefill_share=PLANNERS_CHOICE),
        "lambdascale, together": ours,
        **{f"12 replicas, {n} prefill": replace(fixed, prefill_share=n / 12) for n in (4, 6)},
        "serverlessllm-own": cluster("serverlessllm-own", 12),
    }
    print("  system                            good   TTFT p95   TPOT p95   GPU s")
    found: dict[str, Split] = {}
    for name, spec in specs.items():
        found[name] = each = split_of(spec, rows, SPLIT_S)
        print(
            f"  {name:<30}{each.good:>8.1%}{each.ttft_p95_s:>9.3f} s"
            f"{each.tpot_p95_s * 1e3:>8.1f} ms{each.gpu_s:>8.0f}",
            flush=True,
        )
    chosen, *others, local = found.values()
    static = max(others[1:], key=lambda each: each.good)
    saved = 100 * (1 - chosen.gpu_s / static.gpu_s)
    claim("GPU time below DistServe's, which does not scale", "49 %", f"{saved:.0f} %")
    claim("good requests beside it", "as many", f"{chosen.good:.1%} against {static.good:.1%}")
    below = 100 * (1 - chosen.ttft_p95_s / local.ttft_p95_s)
    claim("TTFT p95 below ServerlessLLM's", "up to 94 %", f"{below:.0f} %")
    print()


def claim(what: str, published: str, ours: str) -> None:
    print(f"  {what}: published {published}, here {ours}")


SECTIONS: Mapping[str, Callable[[Path], None]] = {
    "multicast": lambda _: multicast(),
    "ramp": lambda _: ramp(),
    "trace": trace,
    "split": split,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--traces", type=Path, default=Path("traces"), metavar="DIR")
    args = parser.parse_args(argv)
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]!r}: there are {', '.join(SECTIONS)}")
    if os.environ.get("PYTHONHASHSEED") != "0":  # fixed, for the same figures every time
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.published", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    for name in args.sections or SECTIONS:
        SECTIONS[name](args.traces)
    return 0


if __name__ == "__main__":
    sys.exit(main())
