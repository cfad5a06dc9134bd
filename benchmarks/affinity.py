"""How much of their prompts chats find cached, and how soon they are answered: by prefix, by
session, and by load alone.

Run: .venv/bin/python -m benchmarks.affinity [--nodes 4] [--chats 16] [--turns 5]. Real nodes, with
a replica each; all chats run at once, and each asks its next turn when it has its answer. Bar: of
what earlier turns have computed, four fifths are found, by prefix and by session. (The rest is the
price of bounded loads.)
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import aiohttp

from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar
from services.gateway.core.routing import OURS, Routing
from services.gateway.service import GatewayService
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.credentials import User
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import import_model
from services.local.watch import Watch
from shared.bus.nats import NatsBus
from shared.config import GatewayConfig
from shared.ids import ModelName
from shared.messages.scaling import ImportModel
from shared.permissions import Role

NAME = ModelName("chats")
MODEL = CheckpointSpec(
    layers=8, hidden=256, intermediate=512, heads=4, kv_heads=2, vocab_size=320, context_length=2048
)
TURN, ANSWER, PAGE = 120, 30, 16
FOUND = 0.8
SETTINGS = {
    "LAMBDASCALE_NODE_THREADS": "1",
    "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(256 << 20),
    "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.02",
    "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
}
WAYS = {
    "by prefix": (OURS, False),
    "by session": (OURS, True),
    "by load alone": (Routing(affinity=False), False),
}


@dataclass(slots=True)
class Found:
    could: int = 0
    """Tokens of prompts whose KV earlier turns have computed, in full pages."""
    cached: int = 0
    first_s: list[float] = field(default_factory=list)


async def chat(url: str, name: str, headers: dict[str, str], turns: int, found: Found) -> None:
    rng = random.Random(name)
    prompt: list[int] = []
    async with aiohttp.ClientSession(url, headers=headers) as http:
        for turn in range(turns):
            computed = (len(prompt) - 1) // PAGE * PAGE if turn else 0
            prompt += [rng.randrange(3, MODEL.vocab_size) for _ in range(TURN)]
            body = {
                "model": NAME, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True,
                "temperature": 0, "return_token_ids": True,
            }  # fmt: skip
            began = time.monotonic()
            async with http.post("/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            found.first_s.append(time.monotonic() - began)
            found.could += computed
            found.cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            prompt += answer["choices"][0]["token_ids"]


async def measure(nodes: int, chats: int, turns: int) -> dict[str, Found]:
    results = {way: Found() for way in WAYS}
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        make_checkpoint(directory / "model", MODEL)
        spec = ClusterSpec(
            directory=directory / "cluster", nodes=nodes, gateway_port=0, settings=SETTINGS
        )
        cluster = Cluster(spec)
        await cluster.start(print)
        try:
            async with NatsBus(bus_config(cluster.state), "bench") as bus:
                watch = Watch()
                await watch.follow(bus)
                path = str(directory / "model")
                request = ImportModel(path=path, name=NAME, min_instances=nodes)
                await import_model(bus, request, say=print)
                while len(watch.replicas) < nodes:
                    await watch.change()
            as_gateway = bus_config(cluster.state, user=User(Role.GATEWAY))
            for way, (routing, named) in WAYS.items():
                config = GatewayConfig(port=0, name="bench")
                async with (
                    NatsBus(as_gateway, "bench-gateway") as bus,
                    GatewayService(bus, config, routing=routing) as gateway,
                ):
                    await ready(gateway.url)
                    await asyncio.gather(
                        *(
                            chat(
                                gateway.url,
                                f"{way} {number}",
                                {"X-Session-ID": f"chat-{number}"} if named else {},
                                turns,
                                results[way],
                            )
                            for number in range(chats)
                        )
                    )
        finally:
            await cluster.stop()
    return results


async def ready(url: str) -> None:
    async with aiohttp.ClientSession(url) as http:
        while True:
            async with http.get("/health") as response:
                if (await response.json())["models"]["served"]:
                    return
            await asyncio.sleep(0.05)


def bars(results: dict[str, Found]) -> Iterator[Bar]:
    print(machine())
    for way, found in results.items():
        share, cuts = found.cached / found.could, quantiles(found.first_s, n=100)
        text = f"{way}: {share:.1%} of what was computed before was found"
        print(f"{text}; a turn took {cuts[49]:.2f} / {cuts[89]:.2f} s (p50 / p90)")
        if WAYS[way][0].affinity:
            yield Bar(f"{text} (bar {FOUND:.0%})", share >= FOUND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    for bar in bars(asyncio.run(measure(args.nodes, args.chats, args.turns))):
        print(bar)


if __name__ == "__main__":
    main()
