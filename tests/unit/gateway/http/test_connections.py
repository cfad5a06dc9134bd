"""Clients that hold connections and do nothing with them."""

import asyncio
import json
from unittest import mock

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from services.gateway.connections import LARGE_BODY, Connections
from shared.config import GatewayConfig
from tests.unit.gateway.http.builders import ASK, post
from tests.unit.gateway.support import Cluster, replica, running

LINE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
SOON_S = 0.2


async def connect(cluster: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = cluster.service.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def said(cluster: Cluster, sent: bytes) -> bytes:
    """All that the gateway says until it closes the connection."""
    reader, writer = await connect(cluster)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return answer


def settings(**changes: float) -> GatewayConfig:
    return GatewayConfig(port=0, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (LINE, b"HTTP/1.1 408"),
        (LINE + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half of the headers", "half of the body"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(sent: bytes, status: bytes) -> None:
    async with running(replica(1), config=settings(client_timeout_s=SOON_S)) as cluster:
        assert (await said(cluster, sent)).startswith(status)


@pytest.mark.parametrize(
    "sent",
    [
        LINE + b"No colon\r\n\r\n",
        LINE + b"X: " + b"x" * 9000 + b"\r\n\r\n",
        b"POST http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01 no HTTP\r\n\r\n",
        LINE + b"Content-Encoding: gzip\r\nContent-Length: 9\r\nConnection: close\r\n\r\nno gzip..",
    ],
)
async def test_what_is_no_http_is_refused_and_fills_no_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(replica(1)) as cluster:
        assert (await said(cluster, sent)).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert not caplog.records


async def test_a_client_that_does_not_read_is_left() -> None:
    """So that it holds no place on an instance for ever."""
    async with (
        running(replica(1), config=settings(client_timeout_s=SOON_S)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        ask = {**ASK, "stream": True, "max_tokens": 40, "n": 8, "logprobs": 5}
        body = json.dumps(ask).encode()
        _, writer = await connect(cluster)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write((LINE + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 500)
        await cluster.loaded(lambda load: load.running_requests > 0)
        await until_open(http, 1)
        writer.close()


async def until_open(http: aiohttp.ClientSession, count: int) -> None:
    """Waits until `count` connections are open. The connection that asks is one of them."""
    while True:
        async with http.get("/metrics") as response:
            if f"lambdascale_gateway_connections {count}.0" in await response.text():
                return


async def test_there_are_only_so_many_connections() -> None:
    async with (
        running(replica(1), config=settings(max_connections=2)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        await until_open(http, 1)
        _, other = await connect(cluster)
        answer = await said(cluster, b"")
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in answer
        other.close()
        await until_open(http, 1)
        async with http.get("/metrics") as response:
            text = await response.text()
        assert "lambdascale_gateway_refused_connections_total 1.0" in text


async def test_one_client_can_have_only_so_many() -> None:
    async with running(replica(1), config=settings(max_connections_per_client=1)) as cluster:
        _, first = await connect(cluster)
        assert (await said(cluster, b"")).startswith(b"HTTP/1.1 429")
        first.close()


async def test_an_answer_may_take_longer_than_clients_may() -> None:
    async with (
        running(replica(1), config=settings(client_timeout_s=SOON_S)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        node = cluster.nodes[1]
        node.pause_at = 3
        asked = asyncio.create_task(post(http, ASK))
        await node.submitted(1)
        await asyncio.sleep(2 * SOON_S)
        node.resume.set()
        status, _ = await asked
        assert status == 200


async def test_large_bodies_that_come_together_are_decoded_one_at_a_time() -> None:
    """Together they would hold up everybody's streams for as long as all of them take."""
    loop = asyncio.get_running_loop()
    connections = Connections(10, 0, 60.0, lambda: None)
    turn, given = 0, list[int]()

    async def next_turns() -> None:
        nonlocal turn
        while len(given) < 8:
            turn += 1
            await asyncio.sleep(0)

    async def one(nbytes: int) -> None:
        payload = aiohttp.StreamReader(mock.Mock(), 1 << 20, loop=loop)
        payload.feed_data(b"x" * nbytes)
        payload.feed_eof()
        request = make_mocked_request("POST", "/", payload=payload)
        assert len(await connections.body(request)) == nbytes
        given.append(turn)

    small = [asyncio.ensure_future(one(10)) for _ in range(4)]
    large = [asyncio.ensure_future(one(LARGE_BODY)) for _ in range(4)]
    await asyncio.gather(next_turns(), *small, *large)
    assert len(set(given[:4])) == 1, "small ones wait for nobody"
    assert len(set(given[4:])) == 4
