"""The gateway among nodes that come, refuse, move and vanish: streams go on as if nothing was."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from services.gateway.core.pace import UNKNOWN_S
from services.gateway.keyed_answers import LOOK_S
from services.gateway.service import GatewayService
from shared import subjects
from shared.bus.base import KvEntry
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryKeyValue
from shared.clock import wall_ns
from shared.config import GatewayConfig
from shared.errors import CapacityExceeded, ConfigError, PeerLost
from shared.ids import ModelName, RequestId
from shared.messages.instances import InstanceState
from shared.messages.pool import ModelRemoved
from shared.messages.serving import AttemptFailed, Cancel, Token, Tokens
from shared.messages.story import StoryQuery, Told
from tests.unit.gateway.reader import ASK, TEXT, Reader, nodes_of
from tests.unit.gateway.support import (
    NAME,
    PATIENCE_S,
    Cluster,
    ids_of,
    path,
    replica,
    running,
    text_files,
)

MOVING = InstanceState.MOVING


async def test_a_request_for_no_instances_waits_for_the_first() -> None:
    async with running() as cluster, asyncio.TaskGroup() as group:
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await cluster.loaded(lambda load: load.queued_requests == 1 and load.queued_tokens == 206)
        await nodes_of(cluster, 1, pause_at=None)
        await cluster.publish(replica(1))
        assert await reading == TEXT
        assert reader.finish == "stop"


@pytest.mark.parametrize("key", ["", "a-key"])
async def test_a_waiting_stream_says_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr("services.gateway.http.sending.KEEPALIVE_S", 4 * LOOK_S)
    async with running() as cluster, asyncio.TaskGroup() as group:
        reader = Reader(cluster, key=key)
        reading = group.create_task(reader.read())
        await reader.until_spoken_to()
        await nodes_of(cluster, 1, pause_at=None)
        await cluster.publish(replica(1))
        assert await reading == TEXT
        assert reader.raw.startswith(b": waiting\n\n")


async def test_a_stream_waits_for_a_store_that_elects_a_leader_and_says_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store forgets what it was asked before."""
    monkeypatch.setattr("services.gateway.http.sending.KEEPALIVE_S", 4 * LOOK_S)
    monkeypatch.setattr("services.gateway.keyed_answers.STATUS_S", LOOK_S)
    monkeypatch.setattr("services.gateway.keyed_answers.STORE_TIMEOUT_S", LOOK_S)
    there, get = asyncio.Event(), MemoryKeyValue.get

    async def get_late(bucket: MemoryKeyValue, key: str) -> KvEntry | None:
        if bucket._bucket.name == subjects.KV_ANSWERS and not there.is_set():
            await asyncio.Event().wait()
        return await get(bucket, key)

    monkeypatch.setattr(MemoryKeyValue, "get", get_late)
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        await nodes_of(cluster, 1, pause_at=None)
        reader = Reader(cluster, key="a-key")
        reading = group.create_task(reader.read())
        await reader.until_spoken_to()
        there.set()
        assert await reading == TEXT
        assert reader.raw.startswith(b": waiting\n\n")


async def test_a_stream_whose_prompt_is_being_scored_says_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each chunk that was scored counts as a sign of life, however long nothing else is said."""
    monkeypatch.setattr("services.gateway.http.sending.KEEPALIVE_S", 1000)
    async with running(replica(1)) as cluster, asyncio.timeout(PATIENCE_S):
        (node,) = await nodes_of(cluster, 1, pause_at=-1)
        node.scored_at_once = 1
        ask = {**ASK, "echo": True, "logprobs": 0, "stream": True}
        async with (
            aiohttp.ClientSession(cluster.service.url) as session,
            session.post("/v1/completions", json=ask) as response,
        ):
            assert await response.content.readline() == b": waiting\n"
            node.resume.set()
            assert b"[DONE]" in await response.content.read()


Vanish = Callable[[Cluster], Awaitable[None]]


async def _leaves_the_set(cluster: Cluster) -> None:
    await cluster.publish(replica(2))


async def _node_is_gone(cluster: Cluster) -> None:
    await cluster.lose(1)
    await cluster.publish(replica(2))


async def _attempt_fails(cluster: Cluster) -> None:
    await cluster.publish(replica(1), replica(2))
    submit = cluster.nodes[1].submits[0]
    failure = AttemptFailed(submit.request, submit.attempt, PeerLost.code, "gone")
    cluster.nodes[1].refusal = CapacityExceeded("not again")
    await cluster.nodes[1].send(submit, failed=failure)


async def _a_token_is_lost(cluster: Cluster) -> None:
    await cluster.publish(replica(1), replica(2))
    submit = cluster.nodes[1].submits[0]
    cluster.nodes[1].refusal = CapacityExceeded("not again")
    await cluster.nodes[1].send(submit, Token(submit.request, submit.attempt, 12, 5))


@pytest.mark.parametrize(
    "vanish", [_leaves_the_set, _node_is_gone, _attempt_fails, _a_token_is_lost]
)
async def test_a_stream_goes_on_elsewhere(vanish: Vanish) -> None:
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        first, second = await nodes_of(cluster, 1, 2, pause_at=10)
        second.pause_at = None
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await reader.until(10)
        await vanish(cluster)
        assert await reading == TEXT
        submit = second.submits[-1]
        assert submit.tokens[submit.prompt_tokens :] == tuple(ids_of(TEXT[:10]))
        assert submit.attempt > first.submits[0].attempt
        await first.until(lambda: bool(first.cancels))


@pytest.mark.parametrize(
    "vanish", [_leaves_the_set, _node_is_gone, _attempt_fails, _a_token_is_lost]
)
async def test_a_prompt_is_scored_to_its_end_elsewhere(vanish: Vanish) -> None:
    ask = {**ASK, "max_tokens": 2, "echo": True, "logprobs": 0}
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        first, second = await nodes_of(cluster, 1, 2, pause_at=-2)
        first.scored_at_once, second.pause_at = 1, None
        async with aiohttp.ClientSession(cluster.service.url) as session:

            async def answer() -> dict[str, Any]:
                async with session.post("/v1/completions", json=ask) as response:
                    found: dict[str, Any] = await response.json()
                    return found

            reading = group.create_task(answer())
            await first.until(lambda: len(first.scores) == 3)
            await vanish(cluster)
            (choice,) = (await reading)["choices"]
        assert choice["text"] == "go onth"
        assert choice["logprobs"]["token_logprobs"] == [
            None, -0.25, -0.5, -0.75, -1, -1.25, 0, -0.125
        ]  # fmt: skip
        assert second.submits[-1].score_from in range(1, 5)


async def test_late_and_repeated_tokens_are_dropped() -> None:
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        first, second = await nodes_of(cluster, 1, 2, pause_at=10)
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await reader.until(10)
        submit = first.submits[0]
        await first.send(submit, first.sent[3], first.sent[9])
        await cluster.publish(replica(2))
        await second.until(lambda: bool(second.submits))
        await first.send(submit, Token(submit.request, submit.attempt, 10, ids_of("X")[0]))
        await first.until(lambda: len(first.cancels) >= 2)  # told again, as it did not listen
        second.resume.set()
        assert await reading == TEXT


async def test_moving_requests_are_spread_evenly() -> None:
    async with running(path(1, 2), path(2, 1)) as cluster, asyncio.TaskGroup() as group:
        nodes = await nodes_of(cluster, 1, 2, 3, 4, pause_at=10)
        readers = [Reader(cluster) for _ in range(8)]
        reading = [group.create_task(reader.read()) for reader in readers]
        for reader in readers:
            await reader.until(10)
        for node in nodes:
            node.pause_at = 20
        before = {node.id: len(node.submits) for node in nodes}
        await cluster.publish(
            path(1, 2, state=MOVING),
            path(2, 1, state=MOVING),
            *(replica(n) for n in (1, 2, 3, 4)),
        )
        for node in nodes:
            await node.submitted(before[node.id] + 2)
            assert all(len(submit.stages) == 1 for submit in node.submits[-2:])
        for node in nodes:
            node.resume.set()
        assert [await task for task in reading] == [TEXT] * 8


async def test_a_request_that_is_nearly_done_stays_where_it_is() -> None:
    async with running(path(1, 2)) as cluster, asyncio.TaskGroup() as group:
        first, second = await nodes_of(cluster, 1, 2, pause_at=10)
        reader = Reader(cluster, {"max_tokens": 12})
        reading = group.create_task(reader.read())
        await reader.until(10)
        await cluster.publish(path(1, 2, state=MOVING), replica(2), step_s=10.0)
        await cluster.until(lambda: cluster.knows([path(1, 2), replica(2)], models=1))
        first.resume.set()
        assert await reading == TEXT[:12]
        assert not second.submits


async def test_what_finds_no_room_goes_on_until_there_is() -> None:
    async with running(path(1, 2)) as cluster, asyncio.TaskGroup() as group:
        _, second = await nodes_of(cluster, 1, 2, pause_at=10)
        readers = [Reader(cluster) for _ in range(2)]
        reading = [group.create_task(reader.read()) for reader in readers]
        for reader in readers:
            await reader.until(10)
        second.pause_at = 20
        await cluster.publish(path(1, 2, state=MOVING), replica(2, slots=1))
        await cluster.loaded(lambda load: sorted(load.instance_requests.values()) == [1, 1])
        second.resume.set()
        assert [await task for task in reading] == [TEXT] * 2
        assert len(second.submits) == 2


async def test_refusals_are_waited_out_without_haste() -> None:
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        (node,) = await nodes_of(cluster, 1, pause_at=None)
        node.refusal = CapacityExceeded("full")
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await node.submitted(4)
        assert [submit.attempt for submit in node.submits] == [1, 2, 3, 4]
        node.refusal = None
        assert await reading == TEXT


async def test_a_request_that_fails_everywhere_ends_with_an_error() -> None:
    config = GatewayConfig(max_attempts=2)
    async with running(replica(1), config=config) as cluster, asyncio.TaskGroup() as group:
        (node,) = await nodes_of(cluster, 1, pause_at=0)
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        for count in (1, 2, 3):
            await node.submitted(count)
            submit = node.submits[-1]
            failure = AttemptFailed(submit.request, submit.attempt, "error", "engine broke")
            await node.send(submit, failed=failure)
        await reading
        assert reader.status == 500
        assert reader.error
        assert "engine broke" in reader.error["message"]


async def test_a_request_that_kills_its_nodes_is_refused_by_name() -> None:
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        nodes = await nodes_of(cluster, 1, 2, pause_at=0)
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        for number, node in enumerate(nodes, 1):
            await node.submitted(1)
            await node.die()
            await cluster.lose(number)
            await cluster.publish(replica(2))
        await reading
        assert reader.status == 422
        assert reader.error
        assert reader.error["code"] == "request_kills_nodes"


async def test_a_full_queue_sends_away() -> None:
    config = GatewayConfig(max_queue=1)
    async with running(config=config) as cluster, asyncio.TaskGroup() as group:
        waiting = group.create_task(Reader(cluster).read())
        await cluster.loaded(lambda load: load.queued_requests == 1)
        refused = Reader(cluster)
        await refused.read()
        assert refused.status == 429
        assert refused.headers["Retry-After"] == str(round(UNKNOWN_S))
        assert refused.error
        assert refused.error["type"] == "rate_limit_error"
        waiting.cancel()
        await cluster.loaded(lambda load: load.queued_requests == 0)


async def test_waiting_ends() -> None:
    config = GatewayConfig(queue_timeout_s=0.1)
    async with running(config=config) as cluster:
        reader = Reader(cluster)
        await reader.read()
        assert reader.status == 429
        assert "Retry-After" in reader.headers


async def test_a_begun_stream_carries_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.sending.KEEPALIVE_S", 0.02)
    async with running(config=GatewayConfig(queue_timeout_s=0.1)) as cluster:
        reader = Reader(cluster)
        await reader.read()
        assert reader.status == 200
        assert reader.error
        assert reader.error["code"] == "capacity"
        assert reader.raw.endswith(b"data: [DONE]\n\n")


async def test_models_come_and_go() -> None:
    async with running(replica(1)) as cluster:
        await nodes_of(cluster, 1, 2, pause_at=None)
        other = ModelName("other/model-2")
        reader = Reader(cluster, {"model": other})
        await reader.read()
        assert reader.status == 404
        record = await cluster.store_model(name=other)
        await cluster.add(record)
        await cluster.publish(replica(2), record=record)
        await cluster.until(lambda: len(cluster.loads[-1].models) == 2)
        assert await Reader(cluster, {"model": other}).read() == TEXT
        removed = ModelRemoved(name=other, model_id=record.model_id)
        cluster.records = cluster.records[:1]
        await cluster.bus.publish(subjects.POOL_MODELS, removed)
        await cluster.until(lambda: len(cluster.loads[-1].models) == 1)
        reader = Reader(cluster, {"model": other})
        await reader.read()
        assert reader.status == 404


async def test_requests_that_wait_for_a_removed_model_end() -> None:
    async with running() as cluster, asyncio.TaskGroup() as group:
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await cluster.loaded(lambda load: load.queued_requests == 1)
        record = cluster.records[0]
        cluster.records = ()
        removed = ModelRemoved(name=record.name, model_id=record.model_id)
        await cluster.bus.publish(subjects.POOL_MODELS, removed)
        await reading
        assert reader.status == 404


async def test_a_model_whose_files_are_missing_is_not_served() -> None:
    async with running(model=False) as cluster:
        files = text_files()
        del files["tokenizer.json"]
        await cluster.add(await cluster.store_model(files))
        await cluster.until(lambda: bool(cluster.loads and cluster.loads[-1].models))
        reader = Reader(cluster)
        await reader.read()
        assert reader.status == 503
        assert reader.error
        assert "tokenizer.json" in reader.error["message"]


async def test_health_says_what_is_missing() -> None:
    broker = MemoryBroker()
    async with (
        MemoryBus(broker) as bus,
        GatewayService(bus, GatewayConfig(port=0)) as service,
        aiohttp.ClientSession(service.url) as http,
    ):

        async def health() -> tuple[int, dict[str, Any]]:
            async with http.get("/health") as response:
                return response.status, await response.json()

        nothing = {"published": 0, "served": 0}
        assert await health() == (
            503,
            {
                "status": "unavailable",
                "error": "not there: registry, planner",
                "bus": True,
                "registry": False,
                "planner": False,
                "models": nothing,
            },
        )
        async with http.get("/live") as response:
            assert response.status == 200
        async with http.get("/v1/models") as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        cluster = Cluster(bus, service)
        await cluster.store_model()
        await cluster.answer()
        await cluster.until(lambda: bool(cluster.loads and cluster.loads[-1].models))
        async with http.get("/v1/models") as response:
            assert response.status == 200
        status, page = await health()
        assert (status, page["status"]) == (200, "ok")
        assert page["models"] == {"published": 1, "served": 0}
        await cluster.publish(replica(1))
        await cluster.until(lambda: cluster.knows([replica(1)], models=1))
        _, page = await health()
        assert page["models"] == {"published": 1, "served": 1}


def connections_of(service: GatewayService) -> float:
    return service._metrics.connections()


async def test_gateways_that_share_a_port_share_the_connections() -> None:
    async with MemoryBus(MemoryBroker()) as bus, contextlib.AsyncExitStack() as stack:
        first = GatewayService(bus, GatewayConfig(port=0, share_port=True))
        await stack.enter_async_context(first)
        port = urlsplit(first.url).port
        assert port is not None
        alone = GatewayConfig(port=port)
        with pytest.raises(ConfigError, match="cannot be used"):
            async with GatewayService(bus, alone):
                pass
        second = GatewayService(bus, GatewayConfig(port=port, share_port=True))
        await stack.enter_async_context(second)
        assert second.url == first.url
        for _ in range(64):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        there = [connections_of(one) for one in (first, second)]
        assert sum(there) == 64
        assert all(there)  # that all go to one of two has a chance of 2^-63


async def test_two_gateways_of_one_name_do_not_meet() -> None:
    """Each would take the other's tokens for those of requests that are over, and cancel them."""
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        (node,) = await nodes_of(cluster, 1, pause_at=10)
        async with GatewayService(cluster.bus, GatewayConfig(port=0)) as other:
            assert other.name == cluster.service.name
            reader = Reader(cluster)
            reading = group.create_task(reader.read())
            await reader.until(10)
            node.resume.set()
            assert await reading == TEXT
        assert node.cancels == []


async def test_the_gateway_tells_the_story_of_a_request() -> None:
    async with running(replica(1)) as cluster:
        (node,) = await nodes_of(cluster, 1, pause_at=None)
        began = wall_ns()
        reader = Reader(cluster)
        assert await reader.read() == TEXT
        request, call = node.submits[0].request, reader.headers["X-Request-ID"]
        assert node.submits[0].cause == call
        subject = subjects.gateway_story(cluster.service.id)
        told = {}
        for about in (request, call, "nobody"):
            query = StoryQuery(subject=about)
            told[about] = (
                await cluster.bus.request(subject, query, Told, timeout=PATIENCE_S)
            ).steps
        states = [step.text.split()[0] for step in told[request]]
        assert states == ["submitted", "streaming", "done"]
        times = [step.at_ns for step in told[request]]
        assert times == sorted(times)
        assert began <= times[0] <= times[-1] <= wall_ns()
        assert [step.text for step in told[call]] == [step.text for step in told[request]]
        assert told["nobody"] == ()


async def test_a_stream_that_failed_is_not_counted_as_cancelled() -> None:
    config = GatewayConfig(max_attempts=0)
    async with running(replica(1), config=config) as cluster, asyncio.TaskGroup() as group:
        (node,) = await nodes_of(cluster, 1, pause_at=10)
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await reader.until(10)
        submit = node.submits[0]
        failure = AttemptFailed(submit.request, submit.attempt, PeerLost.code, "gone")
        await node.send(submit, failed=failure)
        await reading
        assert reader.error
        assert await metrics(cluster, "requests_total") == [
            f'lambdascale_gateway_requests_total{{end="error",model="{NAME}"}} 1.0'
        ]


async def test_nothing_stays_of_a_removed_model() -> None:
    async with running(replica(1)) as cluster:
        record = cluster.records[0]
        assert await metrics(cluster, "queued_requests")
        cluster.records = ()
        await cluster.publish(record=record)
        removed = ModelRemoved(name=record.name, model_id=record.model_id)
        await cluster.bus.publish(subjects.POOL_MODELS, removed)
        await cluster.until(lambda: not cluster.loads[-1].models)
        for gauge in ("queued_requests", "running_requests", "outstanding_tokens"):
            assert await metrics(cluster, gauge) == []


async def metrics(cluster: Cluster, name: str) -> list[str]:
    async with (
        aiohttp.ClientSession(cluster.service.url) as http,
        http.get("/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    return [line for line in lines if line.startswith(f"lambdascale_gateway_{name}")]


async def test_keys_that_are_no_digests_are_refused() -> None:
    async with MemoryBus(MemoryBroker()) as bus:
        with pytest.raises(ConfigError, match="SHA-256"):
            async with GatewayService(bus, GatewayConfig(port=0, api_keys=("secret",))):
                pass


async def test_draining_lets_streams_end_and_sends_new_ones_away() -> None:
    async with running(replica(1)) as cluster, asyncio.TaskGroup() as group:
        (node,) = await nodes_of(cluster, 1, pause_at=10)
        reader = Reader(cluster)
        reading = group.create_task(reader.read())
        await reader.until(10)
        draining = group.create_task(cluster.service.drain())
        late = Reader(cluster)
        await asyncio.sleep(0)
        await late.read()
        assert late.status == 503
        node.resume.set()
        assert await reading == TEXT
        await draining


async def test_streams_that_are_cut_off_are_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatewayService, "drain_s", 0.05)
    async with asyncio.TaskGroup() as group:
        async with running(replica(1)) as cluster:
            (node,) = await nodes_of(cluster, 1, pause_at=10)
            reader = Reader(cluster)
            reading = group.create_task(_cut_off(reader))
            await reader.until(10)
        await reading
        assert reader.text == TEXT[:10]
        assert [cancel.request for cancel in node.cancels] == [node.submits[0].request]


async def _cut_off(reader: Reader) -> None:
    with pytest.raises(aiohttp.ClientPayloadError):
        await reader.read()


async def test_tokens_of_unknown_requests_are_withdrawn() -> None:
    """A gateway that was restarted stops what its predecessor began."""
    async with running(replica(1)) as cluster:
        node = cluster.nodes[1]
        stray = Token(RequestId("old"), 3, 7, 1)
        message = Tokens(node=node.id, tokens=(stray,))
        await cluster.bus.publish(subjects.gateway_tokens(cluster.service.id), message)
        await node.until(
            lambda: node.cancels == [Cancel(request=RequestId("old"), attempt=3, cause="late")]
        )
