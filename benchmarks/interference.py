"""What loading costs the requests of a model that serves on the same nodes, in virtual time.

Run: `.venv/bin/python -m benchmarks.interference`, ten minutes. The real services run on modelled
hardware: H800 devices. One model serves on half of the nodes, where prefill and decode are apart,
so that KV flows over their links. Meanwhile weights are loaded, over and over: another model to all
nodes, to those that serve, too, and from them (`other`), or the model itself to the other half of
the nodes, from those that serve (`own`). The same requests are served with and without these loads.
BlitzScale (OSDI 2025, section 5.2) plans so that loading does not disturb serving; the bar is a
tenth of the time to first token.

`no rules` is what it would be if KV and weights shared ports evenly, and the planner did not know
of KV; `ports` if nodes sent KV first, and the planner did not know of it.
"""

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

import msgspec

from benchmarks.roles import at
from services.node.transport import pacing
from services.planner.core.kv_traffic import KvTraffic
from shared import subjects, telemetry
from shared.config import TelemetryConfig
from shared.errors import Conflict
from shared.ids import ModelName
from shared.messages.scaling import ScaleAccepted, SetInstances
from simulation import loop, systems
from simulation.cluster import Cluster, ClusterSpec
from simulation.hardware import hardware
from simulation.models import model
from simulation.results import SystemRun
from simulation.run import CHUNKS, TAIL_S, result, watched
from simulation.synthetic import synthesize
from simulation.traces import Row

SERVES, LOADED, HARDWARE, NODES = "llama-2-13b", "llama-2-7b", "h800-400g", 8
PROMPT, OUTPUT = 2048, 128
REPLICAS = NODES // 2
PERIOD_S = 2.0
"""A load begins so often, or when the one before is over."""
HELD_S = 1.0
"""How long nodes are asked to have what is loaded."""
BAR = 1.10
ASK_S, AGAIN_S = 5.0, 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    gbit: float
    """The rate of each link in each direction."""
    rate: float
    """Requests a second."""
    loads: str
    """What is loaded: `other` or `own`."""


SETTINGS = (
    Setting(400.0, 8.0, "other"),  # KV takes a seventh of the ports, in the mean
    Setting(100.0, 10.0, "other"),  # three quarters
    Setting(100.0, 10.0, "own"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    ttft_s: tuple[float, float]
    """p50, p90."""
    second_s: tuple[float, float]
    """Until the second token, which needs the KV where it is decoded."""
    tpot_s: tuple[float, float]
    load_s: tuple[float, float]
    """How long loads took from the decision on: the median, and the longest."""
    late: float
    """The median of what loads took, by what was predicted."""
    moved: float
    """Bytes that events have moved."""
    lost: int


def spec(setting: Setting) -> ClusterSpec:
    links = {"nic_bytes_per_s": setting.gbit * 1e9 / 8}
    return ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=msgspec.structs.replace(hardware(HARDWARE), **links),
        models=(model(SERVES, "serves"), model(LOADED, "loaded")),
        nodes=NODES,
        chunks=CHUNKS,
        slots=64,
        kv_moves="always",
        prefill_share=0.5,
        checked=False,
    )


@contextmanager
def rules(names: str) -> Iterator[None]:
    """Takes away what `no rules` and `ports` are without."""
    with ExitStack() as stack:
        if names in ("no rules", "ports"):
            stack.enter_context(patch.object(KvTraffic, "flows", lambda self, now: {}))
        if names == "no rules":
            stack.enter_context(patch.object(pacing, "SERVING_PARTS", 1))
        yield


async def order(cluster: Cluster, name: str, instances: int) -> None:
    """Sets the number of instances, once no event runs that would have to shrink."""
    asked = SetInstances(name=ModelName(name), instances=instances)
    while True:
        try:
            await cluster.bus.request(subjects.PLANNER_SCALE, asked, ScaleAccepted, timeout=ASK_S)
        except Conflict:
            await asyncio.sleep(AGAIN_S)
        else:
            return


async def keep_loading(cluster: Cluster, loads: str) -> None:
    name, least = ("serves", REPLICAS) if loads == "own" else ("loaded", 1)
    await asyncio.sleep(TAIL_S)
    while True:
        await order(cluster, name, NODES)
        await asyncio.sleep(HELD_S)
        await order(cluster, name, least)
        await asyncio.sleep(PERIOD_S - HELD_S)


async def run(setting: Setting, rows: Sequence[Row], *, loads: bool) -> SystemRun:
    async with Cluster(spec(setting)) as cluster:
        await cluster.serving()
        await order(cluster, "serves", REPLICAS)
        loading = asyncio.create_task(keep_loading(cluster, setting.loads)) if loads else None
        watch = await watched(cluster, rows)
        if loading is not None:
            loading.cancel()
        return result("lambdascale", watch)


def figures(setting: Setting, rows: Sequence[Row], seed: int, names: str) -> Figures:
    with rules(names):
        found = loop.run(run(setting, rows, loads=names != "no loads"), seed=seed)
    waits = [r.ttft_s for r in found.requests if r.ttft_s is not None]
    seconds = [
        r.second_token_s - r.arrival_s for r in found.requests if r.second_token_s is not None
    ]
    paces = [r.tpot_s for r in found.requests if r.tpot_s is not None]
    last_s = max(r.last_token_s or 0.0 for r in found.requests)
    took = [
        (e.all_complete_s - e.decided_s, e.predicted_s or 0.0)
        for e in found.events
        if e.all_complete_s is not None and 0 <= e.decided_s <= last_s
    ]
    return Figures(
        (at(waits, 0.5), at(waits, 0.9)),
        (at(seconds, 0.5), at(seconds, 0.9)),
        (at(paces, 0.5), at(paces, 0.9)),
        (median(s for s, _ in took), max(s for s, _ in took)) if took else (0.0, 0.0),
        median(s / predicted for s, predicted in took if predicted) if took else 0.0,
        sum(event.bytes_moved for event in found.events),
        sum(not request.completed for request in found.requests),
    )


def requests(setting: Setting, seconds: float, seed: int) -> list[Row]:
    text = f"poisson:rate={setting.rate},seconds={seconds},prompt={PROMPT},output={OUTPUT}"
    return [
        Row(r.arrival_s, r.prompt_tokens, r.output_tokens, "serves")
        for r in synthesize(text, seed=seed).rows
    ]


def compare(setting: Setting, seconds: float, seeds: int) -> float:
    """The median over seeds of TTFT with loads, by that without, the worse of p50 and p90."""
    what = f"{LOADED} to all" if setting.loads == "other" else f"{SERVES} to all from those"
    print(
        f"\n{SERVES} on {REPLICAS} of {NODES} nodes, half prefill, {setting.gbit:g} Gbit/s; "
        f"{setting.rate:g} requests/s of {PROMPT} + {OUTPUT} tokens; loads of {what}"
    )
    print(
        "seed            TTFT p50    p90  2nd p50    p90  TPOT p50    p90   load  most  late    GB"
    )
    ratios: dict[str, list[float]] = {}
    for seed in range(seeds):
        rows, alone = requests(setting, seconds, seed), None
        for names in ("no loads", "all rules", "ports", "no rules"):
            each = figures(setting, rows, seed, names)
            alone = alone or each
            print(
                f"{seed:4}  {names:9} {each.ttft_s[0] * 1e3:5.0f} ms {each.ttft_s[1] * 1e3:6.0f} "
                f"{each.second_s[0] * 1e3:5.0f} ms {each.second_s[1] * 1e3:6.0f} "
                f"{each.tpot_s[0] * 1e3:6.1f} ms {each.tpot_s[1] * 1e3:6.1f} "
                f"{each.load_s[0]:4.2f} s {each.load_s[1]:5.2f} {each.late:5.2f} "
                f"{each.moved / 1e9:5.0f}" + (f", {each.lost} lost" if each.lost else ""),
                flush=True,
            )
            worse = max(a / b for a, b in zip(each.ttft_s, alone.ttft_s, strict=True))
            ratios.setdefault(names, []).append(worse)
    for names in ("all rules", "ports", "no rules"):
        each_s = ", ".join(f"{ratio:.3f}" for ratio in ratios[names])
        print(f"TTFT by that without loads, {names}: {median(ratios[names]):.3f} ({each_s})")
    return median(ratios["all rules"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    worst = max(compare(setting, args.seconds, args.seeds) for setting in SETTINGS)
    print(f"\nThe worst with all rules: {worst:.3f}; bar: {BAR:g}")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
