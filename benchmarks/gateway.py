"""The time that the gateway adds to a request: the same request over HTTP, and straight to the
node.

Run: .venv/bin/python -m benchmarks.gateway. It starts a real cluster of one node with a tiny model
on this machine. Requests of one token alternate between both doors, one at a time. The peer is the
node's own answer over NATS; the figure is the difference of the medians.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.credentials import User
from services.local.demo_model import CheckpointSpec, make_checkpoint
from services.local.publishing import import_model
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import On
from shared.bus.nats import NatsBus
from shared.ids import GatewayId, ModelName, RequestId
from shared.messages import Ok
from shared.messages.pool import ModelRecord
from shared.messages.scaling import ImportModel
from shared.messages.serving import Sampling, Submit, Tokens
from shared.permissions import Role

ROUNDS = 300
LIMIT_MS = 2.0
MODEL = ModelName("bench")
PROMPT = tuple(range(10, 26))
SPEC = CheckpointSpec(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=512
)


async def over_http(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds from sending a request to the event of the first token."""
    body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
    started = time.perf_counter()
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not first and b"token_ids" in line:
                first = time.perf_counter() - started
    return first


class Direct:
    """A gateway's place on the bus, without a gateway."""

    def __init__(self, bus: NatsBus, record: ModelRecord, watch: Watch) -> None:
        self._bus = bus
        self._record = record
        self._instance = watch.replicas[0]
        self._gateway = GatewayId("bench")
        self._token = asyncio.Event()
        self._count = 0

    async def start(self) -> None:
        await self._bus.subscribe(subjects.gateway_tokens(self._gateway), On(Tokens, self._receive))

    async def _receive(self, message: Tokens) -> None:
        self._token.set()

    async def ask(self) -> float:
        self._count += 1
        self._token.clear()
        submit = Submit(
            request=RequestId(f"bench-{self._count}"),
            attempt=1,
            gateway=self._gateway,
            model_id=self._record.model_id,
            instance=self._instance.id,
            stages=self._instance.stages,
            tokens=PROMPT,
            prompt_tokens=len(PROMPT),
            max_tokens=1,
            stop_ids=(),
            sampling=Sampling(),
        )
        started = time.perf_counter()
        subject = subjects.node_submit(self._instance.leader)
        await self._bus.request(subject, submit, Ok, timeout=5.0)
        await self._token.wait()
        return time.perf_counter() - started


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_checkpoint(checkpoint, SPEC)
        settings = {"LAMBDASCALE_NODE_THREADS": "1"}
        spec = ClusterSpec(
            directory=Path(directory) / "cluster", nodes=1, gateway_port=0, settings=settings
        )
        cluster = Cluster(spec)
        await cluster.start()
        try:
            await measure(cluster, checkpoint)
        finally:
            await cluster.stop()


async def measure(cluster: Cluster, checkpoint: Path) -> None:
    as_gateway = bus_config(cluster.state, user=User(Role.GATEWAY))
    async with (
        NatsBus(bus_config(cluster.state), "bench") as bus,
        NatsBus(as_gateway, "bench-gateway") as gateway_bus,
        aiohttp.ClientSession() as http,
    ):
        watch = Watch()
        await watch.follow(bus)
        record = await import_model(
            bus, ImportModel(path=str(checkpoint), name=MODEL, min_instances=1), say=lambda _: None
        )
        while not watch.replicas:
            await watch.change()
        direct = Direct(gateway_bus, record, watch)
        await direct.start()
        url = cluster.state.gateway_url
        pairs = [(await over_http(http, url), await direct.ask()) for _ in range(ROUNDS)]
    with_gateway, without = ([pair[i] * 1e3 for pair in pairs[20:]] for i in (0, 1))
    added = statistics.median(with_gateway) - statistics.median(without)
    print(f"time to first token, median of {len(without)}, one request at a time")
    print(f"  through the gateway {statistics.median(with_gateway):6.2f} ms")
    print(f"  straight to the node {statistics.median(without):5.2f} ms")
    print(
        f"  added by the gateway {added:5.2f} ms  (limit {LIMIT_MS} ms: {added / LIMIT_MS:.2f} x)"
    )


if __name__ == "__main__":
    asyncio.run(main())
