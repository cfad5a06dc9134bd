"""The time that the gateway adds to a request: the same request over HTTP, and straight to the
node."""

import asyncio
import time

import aiohttp

from benchmarks.gateway.model import BENCH, PROMPT
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import On
from shared.bus.nats import NatsBus
from shared.ids import GatewayId, RequestId
from shared.messages import Ok
from shared.messages.pool import ModelRecord
from shared.messages.serving import Sampling, Submit, Tokens


async def over_http(session: aiohttp.ClientSession, url: str) -> float:
    """Seconds from sending a request to the event of the first token."""
    body = {"model": BENCH, "prompt": PROMPT, "max_tokens": 1, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
    started = time.perf_counter()
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for line in response.content:
            if not first and line.startswith(b"data"):
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
        """Seconds from sending a request to its first token."""
        self._count += 1
        self._token.clear()
        submit = Submit(
            request=RequestId(f"bench-{self._count}"),
            attempt=1,
            gateway=self._gateway,
            model_id=self._record.model_id,
            instance=self._instance.id,
            stages=self._instance.stages,
            tokens=tuple(PROMPT),
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
