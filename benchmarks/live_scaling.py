"""Live scaling: an overloaded replica and the node that is loading beside it, against the optimum.

Run: `.venv/bin/python -m benchmarks.live_scaling`, one minute. The real services run on modelled
hardware: Llama-2-13B on two H800 devices, one of which serves. Prompts come all at once, as many
as take far longer than loading does, and the link is as fast as loads a layer in the time of so
many layers of a prompt. The optimum is BlitzScale's ZigZag by the greedy rule of docs/planning.md,
with the times at which blocks really came (`simulation.zigzag`). Beside it: nodes serve once they
are complete (`planner.serving = "none"`).

With `--real` the services are real processes on this machine, whose links and engines are paced: a
prompt takes half a second, and loading the model six.

in the window   prompts that were finished before the load was over
TTFT            the mean, of as many of the first prompts as the optimum finishes in that time; and
                of all
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import aiohttp
import msgspec

from services.gateway.core.routing import OURS as ROUTING
from services.local import cluster as local
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import publish
from services.local.watch import Watch
from shared import subjects, telemetry
from shared.bus.base import Bus, On
from shared.bus.nats import NatsBus
from shared.clock import now
from shared.config import TelemetryConfig
from shared.ids import ModelName, NodeId
from shared.messages.scaling import BlockArrived, ImportModel
from simulation import loop, systems
from simulation.cluster import Cluster, ClusterSpec
from simulation.engine import Costs
from simulation.hardware import Hardware, hardware
from simulation.models import Model, model, modelled_manifest
from simulation.run import CHUNKS, watched
from simulation.traces import Row
from simulation.zigzag import finishes

MODEL, HARDWARE = "llama-2-13b", "h800-400g"
BLOCKS, SLOTS = 16, 64
BAR = 1.05
"""The mean TTFT in the window, over the optimum's."""


@dataclass(frozen=True, slots=True)
class Load:
    prompts: int
    length: int
    layers: float
    """How many layers of a prompt run in the time in which one is loaded."""


LOADS = (
    Load(16, 2048, 6),
    Load(32, 2048, 6),
    Load(32, 2048, 12),
    Load(32, 2048, 3),
    Load(32, 1024, 12),
)


REAL = Load(24, 32, 12)
REAL_SPEC = CheckpointSpec(
    layers=14, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=512
)
REAL_BAR, STEP_S, LOADING_S = 1.15, 0.5, 6.0
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    finished: tuple[float, ...]
    ready: tuple[float, ...]
    """When the target could run each block."""


def prompt_costs(costs: Costs, length: int, layers: int) -> float:
    return costs.layers(layers, length, length, length * (length + 1) / 2)


def slowed(load: Load, device: Hardware, shape: Model) -> Hardware:
    layer_s = prompt_costs(Costs(shape, device), load.length, 1)
    rate = shape.layer_parameters * shape.itemsize / (load.layers * layer_s)
    return msgspec.structs.replace(
        device, nic_bytes_per_s=rate / device.nic_efficiency, ssd_bytes_per_s=rate / 2
    )


def simulate(load: Load, serving: str) -> Run:
    shape = model(MODEL, "m")
    system = replace(systems.named("lambdascale"), serving=serving)
    spec = ClusterSpec(
        system=replace(system, routing=replace(ROUTING, refuses=False)),
        hardware=slowed(load, hardware(HARDWARE), shape),
        models=(shape,),
        nodes=2,
        blocks=BLOCKS,
        chunks=CHUNKS,
        slots=SLOTS,
        disk_copies=1,
        checked=False,
    )
    rows = [Row(0.0, load.length, 1, "m")] * load.prompts
    ready: dict[int, float] = {}

    async def run() -> Run:
        async with Cluster(spec) as cluster:

            async def on(block: BlockArrived) -> None:
                ready[block.block] = now()

            await cluster.bus.subscribe(subjects.ARRIVALS, On(BlockArrived, on))
            watch = await watched(cluster, rows)
            finished = sorted(r.ttft_s for r in watch.results if r.ttft_s is not None)
            there = tuple(ready[block] - watch.start for block in range(BLOCKS))
            return Run(tuple(finished), there)

    return loop.run(run(), seed=0, limit_s=3600.0)


async def measure(load: Load, serving: str) -> Run:
    """The same with real processes."""
    with tempfile.TemporaryDirectory(prefix="lambdascale-bench-") as name:
        folder = Path(name)
        make_checkpoint(folder / "checkpoint", REAL_SPEC)
        nbytes = sum(file.stat().st_size for file in (folder / "checkpoint").glob("*.safetensors"))
        settings = {
            "LAMBDASCALE_NODE_THREADS": "1",
            "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
            "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
            "LAMBDASCALE_NODE_LINK_BYTES_PER_S": str(int(nbytes / LOADING_S)),
            "LAMBDASCALE_NODE_STEP_FLOOR_S": str(STEP_S),
            "LAMBDASCALE_NODE_STEP_TOKENS": str(load.length),
            "LAMBDASCALE_NODE_SLOTS": "2",
            "LAMBDASCALE_PLANNER_SERVING": serving,
            "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
        }
        spec = local.ClusterSpec(
            directory=folder, nodes=2, gateway_port=0, settings=settings, apart=True
        )
        cluster = local.Cluster(spec)
        await cluster.start()
        try:
            async with NatsBus(local.bus_config(cluster.state), "bench") as bus:
                return await _measured(load, bus, cluster.state.gateway_url, folder / "checkpoint")
        finally:
            await cluster.stop()


async def _measured(load: Load, bus: Bus, url: str, checkpoint: Path) -> Run:
    watch = Watch()
    await watch.follow(bus)
    request = ImportModel(path=str(checkpoint), name=ModelName("m"), blocks=BLOCKS, min_instances=1)
    await publish(bus, request, node=NodeId("node-0"), say=lambda _: None)
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        while not watch.replicas:
            await watch.change()
        source = watch.replicas[0].leader

        async def ask(number: int) -> float:
            prompt = random.Random(number).choices(range(3, 320), k=load.length)
            body = {"model": "m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                await response.read()
            return time.time() - began

        began = time.time()
        await ask(-1)
        began = time.time()
        finished = await asyncio.gather(*map(ask, range(load.prompts)))
        ready: dict[int, float] = {}
        while len(ready) < BLOCKS:
            blocks = [a for a in watch.arrivals if a.node != source]
            ready = {a.block: a.ready_ns / 1e9 - began for a in blocks}
            if len(ready) < BLOCKS:
                await watch.change()
        return Run(tuple(sorted(finished)), tuple(ready[block] for block in range(BLOCKS)))


def optimum(load: Load, ready: tuple[float, ...]) -> list[float]:
    shape, device = model(MODEL, "m"), hardware(HARDWARE)
    costs = Costs(shape, device)
    manifest = modelled_manifest(shape, blocks=BLOCKS, unit=1 << 20)
    block_s = [prompt_costs(costs, load.length, shape.block_layers(b)) for b in manifest.blocks]
    block_s[-1] += costs.head(1) + costs.sweep_overhead
    return sorted(finishes(load.prompts, block_s, ready))


def report(load: Load, serving: str, run: Run, best: list[float]) -> float:
    """Returns the mean TTFT in the window, over the optimum's."""
    over = run.ready[-1]
    first = max(1, sum(at <= over for at in best))
    ours = fmean(run.finished[:first]), fmean(run.finished)
    ideal = fmean(best[:first]), fmean(best)
    print(
        f"{load.prompts:7} {load.length:7} {load.layers:5g}   "
        f"{'lambdascale' if serving == 'pools' else 'stop the world':<15} "
        f"{sum(at <= over for at in run.finished):5} of {first:<5} "
        f"{ours[0]:6.3f} ({ours[0] / ideal[0]:.3f} x)  {ours[1]:6.3f} "
        f"({ours[1] / ideal[1]:.3f} x)",
        flush=True,
    )
    return ours[0] / ideal[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", action="store_true", help="real processes, paced")
    real = parser.parse_args().real
    bar = REAL_BAR if real else BAR
    print("prompts  tokens  load   system          in the window   TTFT (optimum)    of all")
    met = True
    for load in (REAL,) if real else LOADS:
        for serving in ("none", "pools"):
            if real:
                run = asyncio.run(measure(load, serving))
                best = sorted(finishes(load.prompts, [STEP_S / BLOCKS] * BLOCKS, run.ready))
            else:
                telemetry.configure("simulation", TelemetryConfig(log_level="off"))
                run = simulate(load, serving)
                best = optimum(load, run.ready)
            over = report(load, serving, run, best)
            met &= serving == "none" or over <= bar
    print(f"bar: at most {bar} x the optimum in the window: {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
