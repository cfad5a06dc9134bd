"""What is written down of calls."""

import asyncio

import aiohttp
import msgspec
import pytest

from services.gateway.core.requests import Request
from shared import subjects
from shared.usage import KEEP_S, MAX_BYTES, CallUsage, UsageBatch
from tests.unit.gateway.dispatch.builders import Driver
from tests.unit.gateway.http.builders import ASK, post
from tests.unit.gateway.http.test_access import ACME, KEY, MINE, until
from tests.unit.gateway.support import Cluster, replica


async def written(cluster: Cluster, count: int) -> list[CallUsage]:
    """What the gateway has written, once it is so many calls."""
    log = await cluster.bus.open_log(subjects.LOG_USAGE, keep_s=KEEP_S, max_bytes=MAX_BYTES)
    while True:
        entries = [entry async for entry in log.since(0)]
        batches = [msgspec.msgpack.decode(entry, type=UsageBatch) for entry in entries]
        calls = [call for batch in batches for call in batch.calls]
        if len(calls) >= count:
            return calls
        await asyncio.sleep(0.05)


async def test_each_call_is_written_down_when_it_ends(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].cached = lambda submit: 4
    cluster.access += [ACME, KEY]
    await until(http, lambda status: status == 401)
    _, answer = await post(http, {**ASK, "n": 2}, **MINE, **{"X-Request-ID": "call-1"})
    usage = answer["usage"]
    (call,) = await written(cluster, 1)
    assert (call.tenant, call.key, call.model, call.call) == ("acme", "k1", "tiny", "call-1")
    assert (call.prompt, call.generated) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (call.cached, call.status) == (4, "done")
    assert 0 < call.device_s <= call.took_s + 0.01
    assert (await post(http, {**ASK, "max_tokens": 1}, **MINE))[0] == 200
    assert [call.generated for call in await written(cluster, 2)] == [call.generated, 1]


async def test_refused_calls_are_not_and_those_that_break_off_are(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    assert (await post(http, {**ASK, "model": "other"}))[0] == 404
    node = cluster.nodes[1]
    node.pause_at = 3
    async with http.post("/v1/completions", json={**ASK, "stream": True}) as response:
        await response.content.readany()
        await node.until(lambda: len(node.sent) == 3)
    await node.until(lambda: len(node.cancels) == 1)
    (call,) = await written(cluster, 1)
    assert (call.tenant, call.key, call.status, call.generated) == ("default", "", "cancelled", 3)


@pytest.mark.parametrize("sharers", [1, 3])
def test_devices_are_shared_by_those_who_run_beside_each_other(sharers: int) -> None:
    driver = Driver(replica(1))
    names = [f"r{number}" for number in range(sharers)]
    driver.admit(*names, prompt=10)
    found: dict[str, Request] = dict(driver.dispatch._ledger.requests)  # type: ignore[arg-type]
    driver.now += 6.0
    for name in names:
        driver.give(name, 1, 0)
    driver.now += 6.0
    for name in names:
        driver.give(name, 1, 1, "stop")
    assert {round(request.device_s, 6) for request in found.values()} == {12.0 / sharers}
    assert {request.kv_token_s for request in found.values()} == {12.0 * (10 + 12) / 2}
