"""The openai client against the gateway over a real nats-server."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletionUserMessageParam

from services.local.nats_server import NatsServer
from shared.bus.nats import NatsBus
from shared.config import BusConfig, GatewayConfig
from shared.messages.instances import Coming
from tests.unit.gateway.support import (
    CONTEXT,
    NAME,
    PATIENCE_S,
    Cluster,
    ids_of,
    path,
    replica,
    running,
)

TEXT = "Grüße aus dem Gateway 🎉, and so on"
HI: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def cluster(nats_server: NatsServer) -> AsyncIterator[Cluster]:
    config = BusConfig(url=nats_server.url)
    buses = NatsBus(config, "others"), NatsBus(config, "gateway")
    async with running(replica(1), buses=buses) as cluster:
        cluster.nodes[1].script = lambda submit: ids_of(TEXT)
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{cluster.service.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [NAME]
    assert (await client.models.retrieve(NAME)).owned_by == "lambdascale"


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=100, n=2)
    assert [choice.text for choice in answer.choices] == [TEXT] * 4
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage
    assert answer.usage.completion_tokens == 4 * (len(ids_of(TEXT)) + 1)


async def test_streamed_completions(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=NAME, prompt="a", max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT.encode()[:9].decode()
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 9


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=NAME, messages=HI, temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=NAME, messages=HI, max_completion_tokens=100, stop=["and"], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == TEXT[: TEXT.index("and")]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model"):
        await client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=NAME, prompt="a", max_tokens=CONTEXT)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")


async def test_a_stream_survives_its_instance(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """From a path to a replica in the middle of the stream, and back to nothing between."""
    first, second = cluster.nodes[1], await cluster.node(2)
    second.script, first.pause_at, second.pause_at = first.script, 10, 20
    stream = await client.completions.create(model=NAME, prompt="a", max_tokens=100, stream=True)
    pieces: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            pieces.append(chunk.choices[0].text)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        await first.until(lambda: len(first.sent) == 10)
        await cluster.publish(path(2, 1))
        await second.until(lambda: len(second.sent) == 10)
        await cluster.publish()
        await cluster.loaded(lambda load: load.queued_requests == 1)
        first.pause_at = None
        await cluster.publish(replica(1))
    assert "".join(pieces) == TEXT


async def test_a_client_that_leaves_cancels(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    node = cluster.nodes[1]
    node.pause_at = 3
    stream = await client.completions.create(model=NAME, prompt="a", max_tokens=100, stream=True)
    await anext(stream)
    await stream.close()
    await node.until(lambda: bool(node.cancels))


async def health(http: aiohttp.ClientSession, status: int) -> None:
    """Waits until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get("/health") as response:
                if response.status == status:
                    return
            await asyncio.sleep(0.01)


async def test_without_nats_requests_are_told_to_come_back(
    restartable: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.frontend.SUBMIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("services.gateway.service.BUS_PATIENCE_S", 0)
    config, bus = GatewayConfig(queue_timeout_s=0.5), BusConfig(url=restartable.url)
    buses = NatsBus(bus, "others"), NatsBus(bus, "gateway")
    body = {"model": NAME, "prompt": "a", "max_tokens": 100}
    async with (
        running(replica(1), config=config, buses=buses) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        cluster.nodes[1].script = lambda submit: ids_of(TEXT)
        await restartable.kill()
        await health(http, 503)
        for patience in (0, 1000):
            monkeypatch.setattr("services.gateway.service.BUS_PATIENCE_S", patience)
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert "NATS" in (await response.json())["error"]["message"]
        monkeypatch.setattr("services.gateway.service.BUS_PATIENCE_S", 0)
        await restartable.start()
        await health(http, 200)
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.json())["choices"][0]["text"] == TEXT


async def test_progress_disturbs_no_client(
    cluster: Cluster, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.http.sending.PROGRESS_S", 0.02)
    told: list[bytes] = []
    said = asyncio.Event()
    write = web.StreamResponse.write

    async def noted(response: web.StreamResponse, data: bytes) -> None:
        told.append(data)
        said.set()
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", noted)
    await cluster.publish(coming=Coming(share=0.6, first_s=900.0, complete_s=None, replicas=2))
    await cluster.loaded(lambda load: True)

    async def ask() -> str:
        stream = await client.chat.completions.create(model=NAME, messages=HI, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(PATIENCE_S):
        await said.wait()
    assert told[0].startswith(b": weights 60 %, first path in ")
    await cluster.publish(replica(1))
    assert await asking == TEXT
