"""What loading costs the requests of a model that serves on the same nodes, in virtual time.

Run: `.venv/bin/python -m benchmarks.interference`, two minutes. The real services run on modelled
hardware: H800 devices with links of 400 Gbit/s. One model serves on half of the nodes, where
prefill and decode are apart, so that KV flows over their links. Meanwhile another model is loaded
to all nodes and given back, over and over: to nodes that serve, too, and from them. The same
requests are served with and without these loads. BlitzScale (OSDI 2025, section 5.2) plans so that
loading does not disturb serving; the bar is a tenth of the time to first token.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.roles import at
from shared import subjects, telemetry
from shared.config import TelemetryConfig
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
RATE = 8.0
"""Requests a second: prefills take nearly half of the time of the two replicas that prefill."""
PERIOD_S = 2.0
"""A load begins so often."""
HELD_S = 1.0
"""How long all nodes are asked to have the loaded model."""
BAR = 1.10
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    ttft_s: tuple[float, float]
    """p50, p90."""
    tpot_s: tuple[float, float]
    moved: float
    """Bytes that events have moved."""
    lost: int


def spec() -> ClusterSpec:
    return ClusterSpec(
        system=systems.named("lambdascale"),
        hardware=hardware(HARDWARE),
        models=(model(SERVES, "serves"), model(LOADED, "loaded")),
        nodes=NODES,
        chunks=CHUNKS,
        slots=64,
        kv_moves="always",
        prefill_share=0.5,
        checked=False,
    )


async def order(cluster: Cluster, name: str, instances: int) -> None:
    asked = SetInstances(name=ModelName(name), instances=instances)
    await cluster.bus.request(subjects.PLANNER_SCALE, asked, ScaleAccepted, timeout=ASK_S)


async def keep_loading(cluster: Cluster) -> None:
    await asyncio.sleep(TAIL_S)
    while True:
        await order(cluster, "loaded", NODES)
        await asyncio.sleep(HELD_S)
        await order(cluster, "loaded", 1)
        await asyncio.sleep(PERIOD_S - HELD_S)


async def run(rows: Sequence[Row], *, loads: bool) -> SystemRun:
    async with Cluster(spec()) as cluster:
        await cluster.serving()
        await order(cluster, "serves", REPLICAS)
        loading = asyncio.create_task(keep_loading(cluster)) if loads else None
        watch = await watched(cluster, rows)
        if loading is not None:
            loading.cancel()
        return result("lambdascale", watch)


def figures(rows: Sequence[Row], seed: int, *, loads: bool) -> Figures:
    found = loop.run(run(rows, loads=loads), seed=seed)
    waits = [r.ttft_s for r in found.requests if r.ttft_s is not None]
    paces = [r.tpot_s for r in found.requests if r.tpot_s is not None]
    return Figures(
        (at(waits, 0.5), at(waits, 0.9)),
        (at(paces, 0.5), at(paces, 0.9)),
        sum(event.bytes_moved for event in found.events),
        sum(not request.completed for request in found.requests),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    print(
        f"{SERVES} on {REPLICAS} of {NODES} nodes, half prefill; {RATE:g} requests/s of {PROMPT} + "
        f"{OUTPUT} tokens. {LOADED} is loaded to all nodes every {PERIOD_S:g} s"
    )
    print("seed  loads   TTFT p50    p90   TPOT p50    p90   moved GB  lost")
    ratios: list[float] = []
    for seed in range(args.seeds):
        text = f"poisson:rate={RATE},seconds={args.seconds},prompt={PROMPT},output={OUTPUT}"
        rows = [
            Row(r.arrival_s, r.prompt_tokens, r.output_tokens, "serves")
            for r in synthesize(text, seed=seed).rows
        ]
        alone, beside = (figures(rows, seed, loads=loads) for loads in (False, True))
        for name, each in (("no", alone), ("yes", beside)):
            print(
                f"{seed:4}  {name:5} {each.ttft_s[0] * 1e3:6.0f} ms {each.ttft_s[1] * 1e3:6.0f} "
                f"{each.tpot_s[0] * 1e3:7.1f} ms {each.tpot_s[1] * 1e3:6.1f} "
                f"{each.moved / 1e9:10.0f} {each.lost:5}",
                flush=True,
            )
        ratios.append(max(a / b for a, b in zip(beside.ttft_s, alone.ttft_s, strict=True)))
    ratio = median(ratios)
    print(f"TTFT with loads, by that without, the worse of p50 and p90: {ratio:.3f}; bar: {BAR:g}")
    return 0 if ratio <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
