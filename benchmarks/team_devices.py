"""A model that fits no device, on two devices of this machine: as stages, and together.

Run: `.venv/bin/python -m benchmarks.team_devices`, five minutes. Two clusters of two nodes with one
thread each have the same Llama of 113M parameters in float32. In one of them `node.team_devices` is
2. What its planner expected, and chose, is printed. Both take turns in every round, so that a drift
of the machine affects both alike.

one      milliseconds a token of one sequence, from its first token on
several  tokens a second of SEVERAL sequences at once
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.machine import machine
from benchmarks.watched import watched
from services.local.cluster import ClusterSpec
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import publish
from shared.ids import ModelName, NodeId
from shared.messages.scaling import ImportModel

SPEC = CheckpointSpec(
    layers=16, hidden=768, intermediate=2048, heads=12, kv_heads=4, vocab_size=512
)
BLOCKS = SPEC.layers + 2
PROMPT, TOKENS, SEVERAL = 16, 64, 8
LIMIT_S = 120.0
NAMES = {1: "stages", 2: "together"}


@dataclass
class Side:
    url: str
    chose: str

    async def ask(self, number: int) -> tuple[float, float]:
        """Returns when the first token of a sequence came, and the last."""
        body = {
            "model": "m",
            "prompt": random.Random(number).choices(range(3, SPEC.vocab_size), k=PROMPT),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        times: list[float] = []
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
            session.post(f"{self.url}/v1/completions", json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    if error := json.loads(line[6:]).get("error"):
                        raise RuntimeError(error)
                    times.append(time.perf_counter())
        return times[0], times[-1]

    async def one(self, number: int) -> float:
        first, last = await self.ask(number)
        return 1e3 * (last - first) / (TOKENS - 1)

    async def several(self, number: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(self.ask(number + i) for i in range(SEVERAL)))
        return SEVERAL * TOKENS / (time.perf_counter() - began)


@asynccontextmanager
async def running(folder: Path, devices: int) -> AsyncIterator[Side]:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, SPEC)
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    settings = {
        "LAMBDASCALE_NODE_THREADS": "1",
        "LAMBDASCALE_NODE_SPECULATION": "0",
        "LAMBDASCALE_NODE_KV_BYTES": str(64 << 20),
        "LAMBDASCALE_NODE_ARENA_BYTES": str(int(0.6 * weights)),
        "LAMBDASCALE_NODE_TENSOR_PARALLEL": "auto",
        "LAMBDASCALE_NODE_TEAM_DEVICES": str(devices),
    }
    spec = ClusterSpec(
        directory=folder / NAMES[devices], nodes=2, gateway_port=0, settings=settings, apart=False
    )
    async with watched(spec) as (cluster, bus, watch):
        request = ImportModel(
            path=str(checkpoint), name=ModelName("m"), min_instances=1, blocks=BLOCKS
        )
        await publish(bus, request, node=NodeId("node-0"), say=lambda _: None)
        async with asyncio.timeout(LIMIT_S):
            while not (watch.replicas and watch.records):
                await watch.change()
        (record,) = watch.records.values()
        yield Side(cluster.state.gateway_url, record.way or "nothing to choose")


async def measure(rounds: int) -> None:
    sides: dict[str, Side] = {}
    found: dict[tuple[str, str], list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lambdascale-bench-")))
        for devices, name in NAMES.items():
            sides[name] = await stack.enter_async_context(running(folder, devices))
            print(f"{name}: {sides[name].chose}")
        for number in range(-1, rounds):
            for name, side in sides.items():
                one, several = await side.one(number), await side.several(1000 + 10 * number)
                if number >= 0:  # what is slow once is over
                    found.setdefault((name, "one"), []).append(one)
                    found.setdefault((name, "several"), []).append(several)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{machine()}; load {load}; medians of {rounds} rounds (the best)")
    for name in sides:
        times, rates = found[name, "one"], found[name, "several"]
        print(
            f"{name:<9} one {median(times):6.2f} ms ({min(times):.2f}), "
            f"{SEVERAL} at once {median(rates):6.1f} tokens/s ({max(rates):.1f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
