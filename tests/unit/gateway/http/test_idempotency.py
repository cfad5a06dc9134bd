"""Requests with an idempotency key: the same answer again, from any gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from services.gateway.service import GatewayService
from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import GatewayConfig
from shared.messages.serving import Submit
from shared.messages.story import StoryQuery, Told
from tests.support.sse import Event, choices_of, read_stream
from tests.unit.gateway.http.builders import ASK, CHAT, post
from tests.unit.gateway.support import PATIENCE_S, Cluster, ids_of, replica, running

KEY = {"Idempotency-Key": "a-key-of-mine"}


def by_seed(submit: Submit) -> list[int]:
    """Sampling: another text for each seed, the same wherever it is drawn."""
    return ids_of(f"drawn by {submit.sampling.seed:x} with ünïcode")


async def stream(
    url: str,
    body: dict[str, Any],
    *,
    last: str = "",
    most: int = 1 << 30,
    call: str = "there",
) -> list[Event]:
    headers = {**KEY, "X-Request-ID": call}
    return await read_stream(url, body, headers, route="chat/completions", last=last, most=most)


def text_of(events: list[Event], index: int = 0) -> str:
    found = [choice for choice in choices_of(events) if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in found)


@dataclass
class Two:
    """Two gateways before the same nodes."""

    cluster: Cluster
    buses: tuple[MemoryBus, MemoryBus]
    services: tuple[GatewayService, GatewayService]

    @property
    def urls(self) -> tuple[str, str]:
        first, second = self.services
        return first.url, second.url

    async def cut_off(self, number: int) -> None:
        """The gateway is gone, as far as the store and the other gateway can tell."""
        bus = self.buses[number]
        for subscription in list(bus.subscriptions):
            await subscription.close()
        bus._open = False
        self.services[number].drain_s = 0.0


def routed(service: GatewayService) -> bool:
    """Whether the gateway knows an instance."""
    return any(model.table.routes for model in service._dispatch._models.values())


@asynccontextmanager
async def two_gateways(config: GatewayConfig | None = None) -> AsyncIterator[Two]:
    broker = MemoryBroker()
    others, own, second = (MemoryBus(broker, name) for name in ("others", "gateway", "second"))
    async with running(replica(1), config=config, buses=(others, own)) as cluster, second:
        cluster.nodes[1].script = by_seed
        async with GatewayService(second, GatewayConfig(port=0)) as service:
            async with asyncio.timeout(PATIENCE_S):
                while not routed(service):  # noqa: ASYNC110 - nobody is told
                    await asyncio.sleep(0.01)
            yield Two(cluster, (own, second), (cluster.service, service))


@pytest.mark.parametrize("body", [ASK, {**CHAT, "n": 2, "logprobs": True}], ids=["text", "chat"])
async def test_the_same_key_gets_the_same_answer_from_any_gateway(body: dict[str, Any]) -> None:
    route = "chat/completions" if "messages" in body else "completions"
    async with two_gateways() as two:
        answers = []
        for url in (*two.urls, *two.urls):
            async with aiohttp.ClientSession(url) as http:
                status, answer = await post(http, body, route, **KEY)
                assert status == 200, answer
                answers.append(answer)
        assert answers == answers[:1] * 4
        submits = two.cluster.nodes[1].submits
        assert len(submits) == body.get("n", 1), "it was generated once"
        async with aiohttp.ClientSession(two.urls[0]) as http:
            _, other = await post(http, body, route, **{"Idempotency-Key": "another"})
        assert other["choices"] != answers[0]["choices"], "another key, another seed"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_is_taken_up_behind_every_event(n: int) -> None:
    body = {**CHAT, "n": n, "stream_options": {"include_usage": True}}
    async with two_gateways() as two:
        whole = await stream(two.urls[0], body)
        assert whole[-1].data == "[DONE]"
        assert len({event.id for event in whole[:-1]}) == len(whole) - 1
        for got in range(1, len(whole), n * n):
            last = whole[got - 1]
            for url in two.urls:
                rest = await stream(url, body, last=last.id)
                if n == 1:
                    assert whole[:got] + rest == whole
                for index in range(n):
                    assert text_of(whole[:got] + rest, index) == text_of(whole, index)
        assert len(two.cluster.nodes[1].submits) == n


async def test_a_stream_goes_on_at_another_gateway_when_its_own_is_gone() -> None:
    async with two_gateways() as two:
        node = two.cluster.nodes[1]
        node.pause_at = 12
        had = await stream(two.urls[0], CHAT, most=8)
        await two.cut_off(0)
        node.pause_at = None
        rest = await stream(two.urls[1], CHAT, last=had[-1].id, call="here")
        expected = bytes(by_seed_text(node.submits[0])).decode()
        assert text_of(had + rest) == expected
        assert node.submits[-1].gateway == two.services[1].id
        query, subject = StoryQuery(subject="here"), subjects.gateway_story(two.services[1].id)
        told = await two.cluster.bus.request(subject, query, Told, timeout=PATIENCE_S)
        steps = [step.text.split(": ")[1] for step in told.steps if "by key" in step.text]
        assert steps[:2] == ["following", "generating"]
        assert node.submits[-1].sampling == node.submits[0].sampling


def by_seed_text(submit: Submit) -> bytes:
    return f"drawn by {submit.sampling.seed:x} with ünïcode".encode()


async def test_a_second_client_follows_the_first_at_any_gateway() -> None:
    async with two_gateways() as two, asyncio.TaskGroup() as group:
        node = two.cluster.nodes[1]
        node.pause_at = 10
        first = group.create_task(stream(two.urls[0], CHAT))
        await node.until(lambda: len(node.sent) == 10)
        here = group.create_task(stream(two.urls[0], CHAT))
        there = group.create_task(stream(two.urls[1], CHAT))
        started = await stream(two.urls[1], CHAT, most=5)
        node.resume.set()
        assert await first == await here == await there
        assert started == (await first)[:5]
        assert len(node.submits) == 1


async def test_a_client_that_leaves_may_come_back_to_what_runs() -> None:
    async with two_gateways() as two:
        node = two.cluster.nodes[1]
        node.pause_at = 10
        had = await stream(two.urls[0], CHAT, most=4)
        node.resume.set()
        rest = await stream(two.urls[0], CHAT, last=had[-1].id)
        assert text_of(had + rest) == by_seed_text(node.submits[0]).decode()
        assert len(node.submits) == 1
        assert not node.cancels


async def test_an_answer_that_nobody_reads_is_given_up_and_taken_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.core.keyed.LINGER_S", 0.0)
    async with two_gateways() as two:
        node = two.cluster.nodes[1]
        node.pause_at = 10
        had = await stream(two.urls[0], CHAT, most=4)
        await node.until(lambda: bool(node.cancels))
        node.pause_at = None
        rest = await stream(two.urls[1], CHAT, last=had[-1].id)
        assert text_of(had + rest) == by_seed_text(node.submits[0]).decode()


async def test_scored_prompts_come_again_too() -> None:
    body = {**ASK, "echo": True, "logprobs": 2, "max_tokens": 3}
    async with two_gateways() as two:
        answers = []
        for url in (*two.urls, *two.urls):
            async with aiohttp.ClientSession(url) as http:
                answers.append(await post(http, body, **KEY))
        assert answers == answers[:1] * 4


async def test_what_is_asked_with_a_key_stays_the_same() -> None:
    async with two_gateways() as two:
        async with aiohttp.ClientSession(two.urls[0]) as http:
            status, _ = await post(http, ASK, **KEY)
            assert status == 200
        for url in two.urls:
            async with aiohttp.ClientSession(url) as http:
                status, answer = await post(http, {**ASK, "max_tokens": 3}, **KEY)
                assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
                status, _ = await post(http, dict(reversed(ASK.items())), **KEY)
                assert status == 200, "the order of fields means nothing"


async def test_nobody_gets_the_answer_of_another_api_key() -> None:
    async with two_gateways() as two, aiohttp.ClientSession(two.urls[0]) as http:
        texts = set()
        for tenant in ("one", "two"):
            status, answer = await post(http, ASK, Authorization=f"Bearer {tenant}", **KEY)
            assert status == 200
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"Idempotency-Key": ""},
        {"Idempotency-Key": "two words"},
        {"Idempotency-Key": "x" * 256},
        {"Last-Event-ID": "3:00000000"},
        {**KEY, "Last-Event-ID": "3:0000"},
        {**KEY, "Last-Event-ID": "3:00000000,0"},
        {**KEY, "Last-Event-ID": "nonsense"},
    ],
)
async def test_headers_that_make_no_sense(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    status, answer = await post(http, ASK, **headers)
    assert status == 400
    assert answer["error"]["param"] in ("Idempotency-Key", "Last-Event-ID")


async def test_a_key_that_was_sent_twice(http: aiohttp.ClientSession) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    async with http.post("/v1/completions", json=ASK, headers=headers) as response:
        assert response.status == 400


@pytest.mark.parametrize("last", ["3:deadbeef", "9999:00000000"])
async def test_an_event_of_another_answer_is_refused(last: str) -> None:
    async with two_gateways() as two, aiohttp.ClientSession(two.urls[0]) as http:
        await stream(two.urls[0], CHAT)
        headers = {**KEY, "Last-Event-ID": last}
        status, answer = await post(http, {**CHAT, "stream": True}, "chat/completions", **headers)
        assert (status, answer["error"]["code"]) == (409, "conflict")


async def test_too_many_keys() -> None:
    config = GatewayConfig(max_keys=2)
    async with two_gateways(config) as two, aiohttp.ClientSession(two.urls[0]) as http:
        for name, expected in (("a", 200), ("b", 200), ("a", 200), ("c", 429)):
            headers = {"Idempotency-Key": name}
            async with http.post("/v1/completions", json=ASK, headers=headers) as response:
                assert response.status == expected
        assert 590 <= int(response.headers["Retry-After"]) <= 600


async def test_without_the_store_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.core.keyed.PATIENCE_S", 0.0)
    async with two_gateways() as two:
        async with aiohttp.ClientSession(two.urls[0]) as http:
            await post(http, ASK, **KEY)
        bucket = await two.cluster.bus.kv(subjects.KV_ANSWERS)
        (entry,) = await bucket.entries()
        await bucket.put(entry.key, b"\xc1 no record")
        async with aiohttp.ClientSession(two.urls[1]) as http:
            status, answer = await post(http, ASK, **KEY)
            assert status == 503
            assert "cannot be read" in answer["error"]["message"]
            status, _ = await post(http, ASK)
            assert status == 200


async def test_a_request_that_failed_may_be_sent_again() -> None:
    async with two_gateways(GatewayConfig(queue_timeout_s=0.1)) as two:
        await two.cluster.publish()
        async with aiohttp.ClientSession(two.urls[0]) as http:
            status, _ = await post(http, ASK, **KEY)
            assert status == 429
            await two.cluster.publish(replica(1))
            status, _ = await post(http, ASK, **KEY)
            assert status == 200
