"""The time that the gateway adds to a request: the same request over HTTP, and straight to the
node."""

import asyncio
import time
from typing import Self, cast
from urllib.parse import urlsplit

import aiohttp
import msgspec

from benchmarks.gateway.model import BENCH, PROMPT
from services.local.watch import Watch
from shared import subjects
from shared.bus.base import On
from shared.bus.nats import NatsBus
from shared.ids import GatewayId, RequestId
from shared.messages import Ok, Ping
from shared.messages.pool import ModelRecord
from shared.messages.serving import Sampling, Submit, Tokens

PATH = "/v1/completions"
BODY = {"model": BENCH, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True}  # fmt: skip
TIMEOUT_S = 5.0
_FIRST, _END = b"\ndata: {", b"\r\n0\r\n\r\n"


class Http(asyncio.Protocol):
    """A client that does little but wait: what it computes would be counted as the server's."""

    def __init__(self, body: dict[str, object]) -> None:
        data = msgspec.json.encode(body)
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self._said = b""
        self._first_at = 0.0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(cls, url: str, body: dict[str, object]) -> Self:
        at, loop = urlsplit(url), asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(body), str(at.hostname), at.port or 80)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        self._said += data
        if not self._first_at and _FIRST in self._said:
            self._first_at = at
        if self._said.endswith(_END) and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(exc or ConnectionError(self._said.decode(errors="replace")))

    async def ask(self) -> float:
        """Seconds from sending a request to the event of the first token."""
        self._said, self._first_at = b"", 0.0
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(self._request)
        async with asyncio.timeout(TIMEOUT_S):
            await self._done
        return self._first_at - started

    def close(self) -> None:
        self._transport.close()


async def by_aiohttp(session: aiohttp.ClientSession, url: str) -> float:
    """The same with aiohttp's client."""
    started = time.perf_counter()
    first = 0.0
    async with session.post(url + PATH, json=BODY) as response:
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

    async def ping(self) -> float:
        """Seconds that a question takes which the node answers at once."""
        started = time.perf_counter()
        subject = subjects.node_ping(self._instance.leader)
        await self._bus.request(subject, Ping(), Ok, timeout=TIMEOUT_S)
        return time.perf_counter() - started

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
        await self._bus.request(subject, submit, Ok, timeout=TIMEOUT_S)
        await self._token.wait()
        return time.perf_counter() - started
