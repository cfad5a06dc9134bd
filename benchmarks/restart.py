"""From the death of a node's process to the next token of a stream that it served.

Run: `.venv/bin/python -m benchmarks.restart [--mb 256] [--rounds 5]`, four minutes. One node
serves a model alone, so that nobody else can go on with the stream. The bar is a second from
restart to serving.

disk      no keeper: the next process starts at once, and reads the model from the disk
keeper    the next process is forked at once, as `up` does it, and goes on with the weights that the
          keeper held
new       the same, but the next process is a new Python, as systemd starts it: it imports all anew
standby   a process that has loaded all but the weights stands by, and goes on with them
hangs     the same, but the process is stopped (SIGSTOP): its keeper takes three seconds to call it
          hung, kills it, and only then hands its memory over
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import torch

from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.nats_servers import Place
from services.local.publishing import import_model
from services.local.watch import Watch
from shared.bus.nats import NatsBus
from shared.ids import ModelName
from shared.messages.scaling import ImportModel

BAR_S = 1.0
IN_FLIGHT_S = 0.1
"""A token that comes within this time of the signal was on its way before."""
LIMIT_S = 120.0
NODE, STANDBY = "node-0", "node-0-standby"
WAITS = "stands by"


@dataclass(frozen=True)
class Case:
    name: str
    keep_s: float = 60.0
    standby: bool = False
    forked: bool = True
    """Whether the processes of the node are forked, rather than started."""
    number: signal.Signals = signal.SIGKILL


CASES = (
    Case("disk", keep_s=0.0),
    Case("keeper"),
    Case("new", forked=False),
    Case("standby", standby=True),
    Case("hangs", standby=True, number=signal.SIGSTOP),
)

BARRED = ("keeper", "standby")


@dataclass
class Stream:
    """An answer that comes: when its last token came, and what all of them are."""

    url: str
    tokens: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, model: str) -> None:
        body = {
            "model": model, "prompt": list(range(3, 67)), "max_tokens": 4000, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as session,
            session.post(f"{self.url}/v1/completions", json=body) as response,
        ):
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", ()):
                    self.tokens += choice.get("token_ids") or ()
                self.news.set()

    async def until(self, count: int) -> None:
        while len(self.tokens) < count:
            self.news.clear()
            async with asyncio.timeout(LIMIT_S):
                await self.news.wait()


@asynccontextmanager
async def running(
    folder: Path, case: Case, nbytes: int, checkpoint: Path
) -> AsyncIterator[Cluster]:
    spec = ClusterSpec(
        directory=folder,
        nodes=1,
        node_standbys=case.standby,
        places={} if case.forked else {NODE: Place(within=("env",))},
        gateway_port=0,
        settings={
            "LAMBDASCALE_NODE_KEEP_WEIGHTS_S": str(case.keep_s),
            "LAMBDASCALE_NODE_ARENA_BYTES": str(nbytes * 9 // 8),
            "LAMBDASCALE_NODE_KV_BYTES": str(256 << 20),
            "LAMBDASCALE_NODE_STEP_FLOOR_S": "0.02",
            "LAMBDASCALE_REGISTRY_DURABLE_COPIES": "1",
        },
    )
    cluster = Cluster(spec)
    await cluster.start()
    try:
        async with NatsBus(bus_config(cluster.state), "restart") as bus:
            watch = Watch()
            await watch.follow(bus)
            request = ImportModel(path=str(checkpoint), name=ModelName("model"), min_instances=1)
            record = await import_model(bus, request, say=lambda _: None)
            watch.n_blocks = record.n_blocks
            async with asyncio.timeout(LIMIT_S):
                while len(watch.replicas) != 1:
                    await watch.change()
            yield cluster
    finally:
        await cluster.stop()


async def measure(cluster: Cluster, case: Case) -> float:
    """Seconds from the signal to the next token, while a stream runs."""
    names = [NODE, STANDBY] if case.standby else [NODE]
    victim = next(name for name in names if at_work(cluster, name))
    stream = Stream(cluster.state.gateway_url)
    run = asyncio.create_task(stream.run("model"))
    try:
        await stream.until(20)
        began = time.monotonic()
        cluster.signal(victim, case.number)
        if not case.standby:
            cluster.start_node(victim)
        await asyncio.sleep(IN_FLIGHT_S)
        await stream.until(len(stream.tokens) + 1)
        took = time.monotonic() - began
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    if case.standby:
        await cluster.ended(victim)
        before = log(cluster, victim).count(WAITS)
        cluster.start_node(victim)
        while log(cluster, victim).count(WAITS) == before:  # noqa: ASYNC110 - it says so there only
            await asyncio.sleep(0.05)
    return took


def log(cluster: Cluster, name: str) -> str:
    return (cluster.spec.directory / "logs" / f"{name}.log").read_text()


def at_work(cluster: Cluster, name: str) -> bool:
    """Whether the process said last that it is ready, rather than that it stands by."""
    said = log(cluster, name)
    return said.rfind(" ready ") > said.rfind(WAITS)


def spec_of(mb: int) -> CheckpointSpec:
    """A Llama in bf16 whose layers have 30 MB each."""
    return CheckpointSpec(
        layers=max(1, mb // 30), hidden=1024, intermediate=4096, heads=16, kv_heads=4,
        vocab_size=2048, dtype=torch.bfloat16,
    )  # fmt: skip


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    args = parser.parse_args()
    print(f"from the signal to the next token, {args.mb} MB, {args.rounds} rounds; median (all)")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        make_checkpoint(checkpoint, spec_of(args.mb))
        for case in CASES:
            if case.name not in args.only:
                continue
            async with running(Path(folder) / case.name, case, args.mb << 20, checkpoint) as up:
                took = [await measure(up, case) for _ in range(args.rounds)]
            median = statistics.median(took)
            every = ", ".join(f"{each:.2f}" for each in sorted(took))
            print(f"{case.name:<8} {median:6.2f} s ({every})", flush=True)
            if case.name in BARRED:
                good = good and median <= BAR_S
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
