"""Keys of tenants over HTTP."""

import asyncio
import hashlib
from collections.abc import Callable
from functools import partial

import aiohttp
import msgspec

from shared.config import GatewayConfig
from shared.ids import KeyId, ModelName, TenantId
from shared.messages.access import KeyRecord, Limits, ServiceTier, TenantRecord
from tests.unit.gateway.http.builders import ASK, post
from tests.unit.gateway.support import NAME, Cluster, replica, running

ACME = TenantRecord(id=TenantId("acme"))
KEY = KeyRecord(id=KeyId("k1"), tenant=ACME.id, digest=hashlib.sha256(b"s").digest())
MINE = {"Authorization": "Bearer ls-k1-s"}


async def until(http: aiohttp.ClientSession, right: Callable[[int], bool], **headers: str) -> int:
    """Asks again until the status is right."""
    while True:
        async with http.get("/v1/models", headers=headers) as response:
            if right(response.status):
                return response.status
        await asyncio.sleep(0.01)


async def test_keys_count_as_they_come_and_go(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    status, _ = await post(http, ASK)
    assert status == 200
    cluster.access += [ACME, KEY]
    await until(http, lambda status: status == 401)
    status, _ = await post(http, ASK, **MINE)
    assert status == 200
    async with http.get("/health") as response:
        assert response.status == 200
    cluster.access.append(msgspec.structs.replace(KEY, revoked_ns=1))
    await until(http, lambda status: status == 401, **MINE)
    status, answer = await post(http, ASK, **MINE)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert "revoked" in answer["error"]["message"]


async def test_models_that_a_key_does_not_reach_seem_not_to_be_there() -> None:
    async with running(replica(1)) as cluster:
        await cluster.add(await cluster.store_model(name=ModelName("other")))
        cluster.access += [ACME, msgspec.structs.replace(KEY, models=(ModelName("other"),))]
        async with aiohttp.ClientSession(cluster.service.url) as http:
            await until(http, lambda status: status == 401)
            async with http.get("/v1/models", headers=MINE) as response:
                listed = [card["id"] for card in (await response.json())["data"]]
            assert listed == ["other"]
            hidden = await post(http, ASK, **MINE)
            missing = await post(http, {**ASK, "model": "none"}, **MINE)
            assert hidden[0] == missing[0] == 404
            assert hidden[1]["error"]["code"] == missing[1]["error"]["code"] == "model_not_found"
            async with http.get(f"/v1/models/{NAME}", headers=MINE) as response:
                assert response.status == 404


LIMITED = msgspec.structs.replace(ACME, limits=Limits(requests_per_min=2, tokens_per_min=10_000))


async def test_who_used_what_may_be_used_is_told_when_to_come_again(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.access += [LIMITED, KEY]
    await until(http, lambda status: status == 401)
    async with http.post("/v1/completions", json=ASK, headers=MINE) as response:
        assert response.status == 200
        used = (await response.json())["usage"]["total_tokens"]
        told = {name.lower(): value for name, value in response.headers.items()}
    assert told["x-ratelimit-limit-requests"] == "2"
    assert told["x-ratelimit-remaining-requests"] == "1"
    assert told["x-ratelimit-reset-requests"] in ("30s", "29.9s")
    assert told["x-ratelimit-limit-tokens"] == "10000"
    assert 10_000 - used <= int(told["x-ratelimit-remaining-tokens"]) <= 10_000  # it refills
    assert (await post(http, {**ASK, "stream": False}, **MINE))[0] == 200
    async with http.post("/v1/completions", json=ASK, headers=MINE) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (429, "rate_limit_exceeded")
        assert "tenant acme (2 requests a minute)" in error["message"]
        assert 28 <= int(response.headers["Retry-After"]) <= 30
        assert response.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_token_with_log_probabilities_counts_twice(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    slow = msgspec.structs.replace(ACME, limits=Limits(tokens_per_min=60))  # one is back in 1 s
    cluster.access += [slow, KEY]
    await until(http, lambda status: status == 401)
    told = {**ASK, "max_tokens": 12, "logprobs": 0}
    async with http.post("/v1/completions", json=told, headers=MINE) as response:
        usage = (await response.json())["usage"]
        left = int(response.headers["x-ratelimit-remaining-tokens"])
    cost = usage["prompt_tokens"] + 2 * usage["completion_tokens"]
    assert usage["completion_tokens"] == 12
    assert 60 - cost <= left < 60 - cost + 6
    status, answer = await post(http, {**told, "max_tokens": 25}, **MINE)
    assert status == 429
    assert "this one may use 60" in answer["error"]["message"]


async def test_a_call_counts_as_what_it_may_cost_and_then_as_what_it_cost(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    node = cluster.nodes[1]
    node.pause_at = 1
    small = msgspec.structs.replace(ACME, limits=Limits(tokens_per_min=300, concurrency=4))
    cluster.access += [small, KEY]
    await until(http, lambda status: status == 401)
    four = {**ASK, "n": 4, "max_tokens": 50}
    async with asyncio.TaskGroup() as group:
        first = group.create_task(post(http, four, **MINE))
        await node.submitted(4)
        status, answer = await post(http, {**ASK, "n": 2}, **MINE)
        assert status == 429
        assert "300 tokens a minute, this one may use 110" in answer["error"]["message"]
        status, answer = await post(http, {**ASK, "n": 1, "max_tokens": 1}, **MINE)
        assert status == 429
        assert "4 completions at a time, 4 run" in answer["error"]["message"]
        node.resume.set()
        status, answer = await first
    assert (status, answer["usage"]["total_tokens"]) == (200, 10 + 4 * 12)
    assert (await post(http, {**ASK, "n": 2}, **MINE))[0] == 200
    status, answer = await post(http, {**ASK, "n": 5}, **MINE)
    assert status == 400
    assert "5 completions in one call" in answer["error"]["message"]


async def test_a_service_tier_must_be_allowed(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    assert (await post(http, {**ASK, "service_tier": "flex"}))[0] == 200
    status, answer = await post(http, {**ASK, "service_tier": "priority"})
    assert (status, answer["error"]["code"]) == (403, "service_tier_not_allowed")
    every = msgspec.structs.replace(ACME, tiers=tuple(ServiceTier))
    cluster.access += [every, KEY]
    await until(http, lambda status: status == 401)
    assert (await post(http, {**ASK, "service_tier": "priority"}, **MINE))[0] == 200
    assert (await post(http, {**ASK, "service_tier": "scale"}, **MINE))[0] == 400


def waits(cluster: Cluster, count: int) -> bool:
    load = cluster.loads[-1].models[0]
    return (load.queued_requests, load.running_requests) == (count, 1)


async def test_what_is_more_urgent_goes_first() -> None:
    async with (
        running(replica(1, slots=1)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
        asyncio.TaskGroup() as group,
    ):
        node = cluster.nodes[1]
        node.pause_at = 1
        for waiting, (tokens, tier) in enumerate(((20, "auto"), (21, "flex"), (22, "default"))):
            body = {**ASK, "max_tokens": tokens, "service_tier": tier}
            group.create_task(post(http, body))
            await cluster.until(partial(waits, cluster, waiting))
        node.resume.set()
        await node.submitted(3)
        assert [submit.max_tokens for submit in node.submits] == [20, 22, 21]


async def test_a_call_that_the_queue_has_no_room_for_costs_nothing() -> None:
    config = GatewayConfig(max_queue=0)
    async with (
        running(replica(1, slots=1), config=config) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
    ):
        cluster.nodes[1].pause_at = 0
        cluster.access += [msgspec.structs.replace(ACME, limits=Limits(requests_per_min=5)), KEY]
        await until(http, lambda status: status == 401)
        for _ in range(10):
            status, answer = await post(http, ASK, **MINE)
            assert (status, answer["error"]["code"]) == (429, "capacity")
