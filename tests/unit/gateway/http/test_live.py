"""The page, who may look at the cluster, and the stream of what changes there."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from services.gateway import lookout
from services.gateway.http import live
from shared import subjects
from shared.errors import NotFound
from shared.ids import EventId, Generation, KeyId, ModelId, NodeId, TenantId
from shared.messages.access import KeyRecord, KeyRole, TenantRecord
from shared.messages.chronicle import (
    Arrival,
    Chronicle,
    ChronicleQuery,
    Count,
    EventPast,
    EventQuery,
    ModelPast,
    Rate,
)
from shared.messages.copies import CopiesQuery, PoolCopies
from shared.messages.decisions import Decided, Verdict
from shared.messages.ledger import Phase, Spent
from shared.messages.pool import Holding, NodeInfo, NodeView, PoolPage, PoolQuery, Tier
from shared.messages.scaling import EventRecord, EventState, Timings
from tests.unit.gateway.http.builders import ASK
from tests.unit.gateway.support import NAME, Cluster, replica, running

TENANT = TenantRecord(id=TenantId("acme"))
KEYS = {
    name: KeyRecord(
        id=KeyId(name), tenant=TENANT.id, digest=hashlib.sha256(b"s").digest(), role=role
    )
    for name, role in (("user", KeyRole.USER), ("boss", KeyRole.ADMIN))
}
EVENT = EventId("ev-1")


def record(*, over: bool = False) -> EventRecord:
    return EventRecord(
        id=EVENT, name=NAME, model_id=ModelId("id"), state=EventState.TRANSFERRING, cause="load",
        revision=0, sources=(NodeId("node-1"),), targets=(NodeId("node-2"),), strategy="chain",
        transfers=(), n_blocks=4, nbytes=100, detected_ns=0, decided_ns=1,
        history=((EventState.DECIDED, 1),), predicted=Timings(), actual=Timings(),
        physical_limit_s=None, bytes_moved=0, trace="",
        ledger=(Spent(Phase.PLAN, 0.1, None),) if over else (),
    )  # fmt: skip


def arrival(block: int) -> Arrival:
    return Arrival(NodeId("node-2"), block, NodeId("node-1"), "tcp", 1, 2, 3, 4)


class Services:
    """What planner and registry remember."""

    def __init__(self) -> None:
        self.record = record()
        self.arrivals = [arrival(0)]
        self.counts = [Count(1_000, 3, 1, 1, 2, 2)]
        self.asked: list[float] = []
        self.followed: list[int] = []
        decided = Decided(at_ns=5, verdict=Verdict.MORE, replicas=1, wanted=2, why="queue")
        self.decisions = (decided,)
        info = NodeInfo(
            node=NodeId("node-1"), generation=Generation(1), address="tcp://x", host="here",
            device="cpu",
            arena_bytes=100, link_bytes_per_s=7, slots=8,
        )  # fmt: skip
        held = Holding(ModelId(f"id-of-{NAME}"), Tier.GPU, (0, 1))
        self.nodes = [NodeView(info=info, holdings=(held,), arena_free=40, reserved_by=None)]

    async def answer(self, cluster: Cluster) -> None:
        bus = cluster.bus
        await bus.serve(subjects.PLANNER_CHRONICLE, ChronicleQuery, self._chronicle)
        await bus.serve(subjects.PLANNER_EVENT, EventQuery, self._event)
        await bus.serve(subjects.REGISTRY_POOL, PoolQuery, self._pool)
        await bus.serve(subjects.REGISTRY_COPIES, CopiesQuery, self._copies)

    async def _chronicle(self, query: ChronicleQuery) -> Chronicle:
        self.asked.append(query.last_s)
        past = ModelPast(name=NAME, counts=tuple(self.counts), decisions=self.decisions)
        return Chronicle(at_ns=9, events=(self.record,), models=(past,), rates=(Rate(1_000, 12.5),))

    async def _event(self, query: EventQuery) -> EventPast:
        if query.event != EVENT:
            raise NotFound("no such event")
        self.followed.append(query.after)
        known = self.arrivals[query.after : query.after + 2]
        return EventPast(
            record=self.record, arrivals=tuple(known), arrived=len(self.arrivals), forgotten=0,
            served=(),
        )  # fmt: skip

    async def _pool(self, _: PoolQuery) -> PoolPage:
        return PoolPage(nodes=tuple(self.nodes), more=False)

    async def _copies(self, _: CopiesQuery) -> PoolCopies:
        return PoolCopies(models=(), nodes=(), memory_bytes=0, per_host_bytes=0)


class Stream:
    """What one page has been told."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.items: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, list[Any]]] = {}

    async def until(self, there: Any) -> None:
        while not there(self):
            line = await self.response.content.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                self._take(json.loads(line[6:]))

    def _take(self, change: dict[str, Any]) -> None:
        for section, items in change["put"].items():
            mine = self.items.setdefault(section, {})
            mine |= items
        for section, series in change["add"].items():
            for key, rows in series.items():
                self.rows.setdefault(section, {}).setdefault(key, []).extend(rows)


@asynccontextmanager
async def opened(http: aiohttp.ClientSession, **headers: str) -> AsyncIterator[Stream]:
    async with http.get("/cluster", headers=headers) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-store"
        yield Stream(response)


@asynccontextmanager
async def shown() -> AsyncIterator[tuple[Cluster, Services, aiohttp.ClientSession]]:
    async with running(replica(1)) as cluster:
        services = Services()
        await services.answer(cluster)
        async with aiohttp.ClientSession(cluster.service.url) as http:
            yield cluster, services, http


async def statuses(http: aiohttp.ClientSession, paths: Iterable[str], **headers: str) -> list[int]:
    found = []
    for path in paths:
        async with http.get(path, headers=headers) as response:
            found.append(response.status)
    return found


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come true")


async def test_the_page_and_its_files_need_no_key_and_load_nothing_from_elsewhere() -> None:
    async with running(replica(1)) as cluster, aiohttp.ClientSession(cluster.service.url) as http:
        cluster.access += [TENANT, KEYS["user"]]
        async with http.get("/") as response:
            page = await response.text()
        assert response.status == 200
        assert response.headers["Content-Security-Policy"] == live.POLICY
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert '<script type="module" src="page/main.js"></script>' in page
        files = [entry.name for entry in live.FILES.iterdir()]
        assert set(await statuses(http, [f"/page/{name}" for name in files])) == {200}
        for name in files:
            text = (live.FILES / name).read_text()
            assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
        wrong = ["/page/none.js", "/page/../service.py", "/page/%2e%2e/service.py", "/page/"]
        assert set(await statuses(http, wrong)) <= {401, 404}


async def test_a_page_is_told_all_that_is_known_and_then_what_changes() -> None:
    async with shown() as (cluster, services, http), opened(http) as page:
        await page.until(lambda page: page.rows.get("arrivals") and page.items.get("nodes"))
        assert page.items["nodes"]["node-1"]["holds"] == [[NAME, "gpu", 2]]
        assert page.items["nodes"]["node-1"]["arena"] == [60, 100]
        assert page.items["instances"]["replica-1"]["stages"] == [["node-1", 0, 4]]
        assert page.items["events"][EVENT]["cause"] == "load"
        assert page.rows["counts"] == {NAME: [[1_000, 3, 1, 1, 2, 2]]}
        assert page.rows["rates"] == {"all": [[1_000, 12.5]]}
        (decided,) = page.rows["decisions"][NAME]
        assert decided["why"] == "queue"
        services.counts.append(Count(2_000, 0, 4, 2, 2, 2))
        services.arrivals += [arrival(1), arrival(2)]
        await page.until(lambda page: len(page.rows["arrivals"][EVENT]) == 3)
        await page.until(lambda page: len(page.rows["counts"][NAME]) == 2)
        assert [row[1] for row in page.rows["arrivals"][EVENT]] == [0, 1, 2]
        assert 1 in services.followed
        assert services.asked[0] == 0
        assert all(last_s >= lookout.OVERLAP_S for last_s in services.asked[1:])
        await cluster.publish()
        await page.until(lambda page: page.items["instances"]["replica-1"] is None)


async def test_what_calls_took_is_shown_by_model_and_tenant() -> None:
    async with shown() as (_, _, http), opened(http) as page:
        async with http.post("/v1/completions", json=ASK) as response:
            assert response.status == 200
        await page.until(lambda page: page.items.get("latencies"))
        (lately,) = page.items["latencies"].values()
        assert (lately["model"], lately["tenant"], lately["calls"]) == (NAME, "default", 1)
        ttft_s, queue_s = lately["ttft_s"][0], lately["queue_s"][0]
        assert ttft_s >= queue_s >= 0
        assert ttft_s > 0
        assert len(lately["tpot_s"]) == 3


async def test_a_page_opened_late_is_told_of_an_event_that_is_over() -> None:
    async with shown() as (_, services, http):
        services.record = record(over=True)
        async with opened(http) as first:
            await first.until(lambda page: page.rows.get("arrivals"))
        async with opened(http) as second:
            await second.until(lambda page: page.rows.get("arrivals"))
            assert second.rows["arrivals"] == first.rows["arrivals"]


async def test_nothing_is_asked_while_no_page_is_open() -> None:
    async with shown() as (cluster, services, http):
        async with opened(http) as page:
            await page.until(lambda page: page.items.get("nodes"))
        await until(lambda: not cluster.service._lookout.looks)
        asked = len(services.asked)
        await cluster.loaded(lambda _: True)
        await cluster.loaded(lambda _: True)
        assert len(services.asked) <= asked + 1


async def test_a_planner_that_does_not_answer_is_named_and_the_rest_shown() -> None:
    async with (
        running(replica(1)) as cluster,
        aiohttp.ClientSession(cluster.service.url) as http,
        opened(http) as page,
    ):
        await page.until(lambda page: len(page.items.get("about", {}).get("missing", ())) == 2)
        assert set(page.items["about"]["missing"]) == {"planner", "registry"}
        assert "replica-1" in page.items["instances"]


async def test_an_event_is_told_whole() -> None:
    async with shown() as (_, services, http):
        services.arrivals = [arrival(block) for block in range(5)]
        async with http.get(f"/cluster/events/{EVENT}") as response:
            past = await response.json()
        assert [row[1] for row in past["arrivals"]] == [0, 1, 2, 3, 4]
        assert past["record"]["id"] == EVENT
        assert await statuses(http, ["/cluster/events/ev-none"]) == [404]


async def test_only_administrators_see_the_cluster() -> None:
    async with shown() as (cluster, _, http):
        cluster.access += [TENANT, *KEYS.values()]
        paths = ["/cluster", f"/cluster/events/{EVENT}"]
        await until(lambda: cluster.service._keyring.revision == len(cluster.access))
        assert await statuses(http, paths) == [401, 401]
        user = {"Authorization": "Bearer ls-user-s"}
        assert await statuses(http, paths, **user) == [403, 403]
        assert await statuses(http, ["/v1/models"], **user) == [200]
        boss = {"Authorization": "Bearer ls-boss-s"}
        for headers, shown_to in ((user, False), (boss, True)):
            asked = headers | {"X-Show-Path": "true"}
            async with http.post(
                "/v1/completions", json={**ASK, "stream": True}, headers=asked
            ) as answer:
                assert (b": over node-1" in await answer.content.read()) is shown_to
        assert await statuses(http, paths[1:], **boss) == [200]
        async with opened(http, **boss) as page:
            await page.until(lambda page: page.items.get("nodes"))


async def test_pages_are_bounded_and_a_closed_one_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookout, "MOST_PAGES", 1)
    async with shown() as (_, _, http):
        async with opened(http), http.get("/cluster") as second:
            assert second.status == 503
            assert (await second.json())["error"]["code"] == "too_many_pages"
        while True:
            async with http.get("/cluster") as third:
                if third.status == 200:
                    break
            await asyncio.sleep(0.01)


async def test_a_stream_ends_when_the_gateway_drains() -> None:
    async with shown() as (cluster, _, http), opened(http) as page:
        await page.until(lambda page: page.items.get("nodes"))
        assert cluster.service._api is not None
        cluster.service._api.drain()
        while await page.response.content.readline():
            pass


async def test_a_silent_stream_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ALIVE_S", 0.0)
    async with shown() as (_, _, http), opened(http) as page:
        while not (await page.response.content.readline()).startswith(b": nothing new"):
            pass
