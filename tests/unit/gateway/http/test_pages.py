"""The list of models, health, metrics, and the id of a request."""

import asyncio
import re

import aiohttp

from services.gateway.metrics import Metrics
from shared.errors import CapacityExceeded
from tests.unit.gateway.http.builders import ASK, post
from tests.unit.gateway.support import CONTEXT, NAME, Cluster


async def test_models(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/models") as response:
        listed = await response.json()
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["created"]) == (NAME, "model", 5)
    assert card["max_model_len"] == CONTEXT
    async with http.get(f"/v1/models/{NAME}") as response:
        assert await response.json() == card
    async with http.get("/v1/models/other") as response:
        assert response.status == 404


async def test_request_id_is_returned(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=ASK, headers={"X-Request-ID": "abc-1"}) as ours:
        assert ours.headers["X-Request-ID"] == "abc-1"
        assert (await ours.json())["id"] == "cmpl-abc-1"
    async with http.get("/health", headers={"X-Request-ID": "bad id\u00e9"}) as made:
        assert made.headers["X-Request-ID"].startswith("req-")


async def test_whether_it_lives_and_is_ready(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    assert cluster.service._api is not None

    async def statuses() -> list[int]:
        found = []
        for path in ("/live", "/ready"):
            async with http.get(path) as response:
                found.append(response.status)
        return found

    assert await statuses() == [200, 200]
    cluster.service._api.drain()
    assert await statuses() == [200, 503]


async def test_health_and_metrics(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    await post(http, ASK)
    await cluster.loaded(lambda load: load.running_requests == 0)
    async with http.get("/health") as response:
        page = await response.json()
    assert (response.status, page["status"], page["models"]["served"]) == (200, "ok", 1)
    async with http.head("/metrics") as response:
        assert response.status == 200
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    assert f'lambdascale_gateway_requests_total{{end="stop",model="{NAME}"}} 1.0' in lines
    assert f'lambdascale_gateway_generated_tokens_total{{model="{NAME}"}} 12.0' in lines
    first = f'gen_ai_server_time_to_first_token_seconds_count{{gen_ai_request_model="{NAME}"}} 1.0'
    assert first in lines
    assert f'vllm:time_to_first_token_seconds_count{{model_name="{NAME}"}} 1.0' in lines
    assert f'lambdascale_gateway_queued_requests{{model="{NAME}"}} 0.0' in lines
    assert f'lambdascale_gateway_instances{{model="{NAME}",state="closed"}} 1.0' in lines
    assert f'lambdascale_gateway_instances{{model="{NAME}",state="open"}} 0.0' in lines


async def test_a_picker_reads_one_series_for_the_gateway(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    async def shown() -> dict[str, float]:
        async with http.get("/metrics/picker") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("vllm:"): float(value) for name, value in pairs}

    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    assert await shown() == dict.fromkeys(names, 0.0)  # and nothing of adapters: there are none
    cluster.nodes[1].refusal = CapacityExceeded("full")
    asking = asyncio.create_task(post(http, ASK))
    await cluster.nodes[1].submitted(1)
    found = await shown()
    assert found["num_requests_waiting"] + found["num_requests_running"] == 1
    cluster.nodes[1].refusal = None
    await asking
    assert await shown() == dict.fromkeys(names, 0.0)


def test_the_series_of_a_removed_model_begin_anew() -> None:
    """A request that still runs then counts nowhere."""
    metrics = Metrics()
    late = metrics.of("m")
    late.tokens.inc(3)
    metrics.forget("m")
    late.tokens.inc(3)
    assert 'model="m"' not in page(metrics)
    metrics.of("m").tokens.inc(2)
    assert 'lambdascale_gateway_generated_tokens_total{model="m"} 2.0' in page(metrics)


def page(metrics: Metrics) -> str:
    return metrics.families.render()[0].decode()


async def test_an_instance_that_refuses_shows(
    cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    cluster.nodes[1].refusal = CapacityExceeded("full")
    asking = asyncio.create_task(post(http, ASK))
    await cluster.nodes[1].submitted(2)
    async with http.get("/metrics") as response:
        text = await response.text()
    opened = rf'lambdascale_gateway_breaker_opened_total{{model="{NAME}",reason="refused"}} [1-9]'
    assert re.search(opened, text)
    cluster.nodes[1].refusal = None
    status, _ = await asking
    assert status == 200
