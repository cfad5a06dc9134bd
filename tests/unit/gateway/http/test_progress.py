"""What clients are told while a model is being loaded."""

import asyncio

import aiohttp
import pytest

from services.gateway.progress import path_text, progress_text
from shared.config import GatewayConfig
from shared.messages.instances import Coming, InstanceState
from tests.unit.gateway.http.builders import ASK
from tests.unit.gateway.support import ids_of, path, replica, running


def coming(
    share: float, first_s: float | None, complete_s: float | None = None, replicas: int = 2
) -> Coming:
    return Coming(share=share, first_s=first_s, complete_s=complete_s, replicas=replicas)


@pytest.mark.parametrize(
    ("what", "serves", "text"),
    [
        (None, False, ""),
        (coming(0.0, None, None, 0), False, "an instance is being planned"),
        (coming(0.624, 0.81, 3.0), False, "weights 62 %, first path in 0.8 s"),
        (coming(0.624, 0.81, 3.0), True, "weights 62 %, all of 2 more in 3.0 s"),
        (coming(0.9, 0.0, 3.0), False, "weights 90 %, all of 2 more in 3.0 s"),
        (coming(0.9, 0.0, 0.0), False, "weights 90 %"),
    ],
)
def test_what_is_said(what: Coming | None, serves: bool, text: str) -> None:
    assert progress_text(what, serves) == text


async def test_a_stream_that_waits_tells_how_far_its_model_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.http.sending.PROGRESS_S", 0.02)
    async with running() as cluster, aiohttp.ClientSession(cluster.service.url) as http:
        await cluster.publish(coming=coming(0.25, 1000.0))
        body = {**ASK, "stream": True}
        async with http.post("/v1/completions", json=body) as response:
            line = await response.content.readline()
            assert line.startswith(b": weights 25 %, first path in ")
            await cluster.publish(coming=coming(0.75, 500.0))
            while b"75 %" not in line:
                line = await response.content.readline()
                assert line == b"\n" or line.startswith(b": weights ")
            node = await cluster.node(1)
            node.script = lambda submit: ids_of("done")
            await cluster.publish(replica(1))
            assert b"[DONE]" in await response.content.read()


async def test_who_is_refused_is_told_when_the_first_instance_should_be_there() -> None:
    config = GatewayConfig(max_queue=0)
    async with (
        running(config=config) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
        asyncio.timeout(100),
    ):
        await cluster.publish(coming=coming(0.25, 41.0))
        after = ""
        while after not in ("40", "41"):
            async with http.post("/v1/completions", json=ASK) as response:
                assert response.status == 429
                after = response.headers["Retry-After"]


async def test_a_stream_says_over_which_nodes_its_tokens_come_if_it_is_asked() -> None:
    body = {**ASK, "stream": True}
    async with running(path(1, 2)) as cluster, aiohttp.ClientSession(cluster.service.url) as http:
        node = await cluster.node(1)
        node.pause_at = 3
        async with http.post(
            "/v1/completions", json=body, headers={"X-Show-Path": "true"}
        ) as response:
            line = await response.content.readline()
            assert line == b": over node-1 0-0 -> node-2 1-1\n"
            await cluster.publish(path(1, 2, state=InstanceState.MOVING), replica(3))
            await (await cluster.node(3)).submitted(1)
            node.resume.set()
            rest = await response.content.read()
        assert rest.count(b": over ") == 1
        assert b": over node-3\n\n" in rest
        assert rest.index(b": over node-3") < rest.index(b"[DONE]")
        async with http.post("/v1/completions", json=body) as response:
            assert b": over" not in await response.content.read()


def test_the_words_for_an_instance() -> None:
    assert path_text(replica(3)) == "node-3"
    assert path_text(path(4, 5)) == "node-4 0-0 -> node-5 1-1"
