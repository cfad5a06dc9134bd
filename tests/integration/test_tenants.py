"""Tenants, keys and limits on a real cluster with two gateways, by the operator's own commands."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from services.local.demo_model import make_checkpoint
from tests.support import commands
from tests.support.cluster import MODEL, Answer, Oracle, Running, running
from tests.support.models import TINY

BODY = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}


@dataclass
class Site:
    up: Running
    directory: Path

    async def run(self, *words: str) -> commands.Ran:
        ran = await commands.run(*words, "--data", str(self.directory), cwd=self.directory)
        assert ran.code == 0, ran.err
        return ran

    async def new_key(self, *words: str) -> str:
        return (await self.run("key", "add", *words)).out.strip()

    async def ask(self, url: str, key: str, **fields: Any) -> tuple[int, Any, Any]:
        """Status, headers and document."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{url}/v1/completions", json={**BODY, **fields}) as response,
        ):
            return response.status, response.headers, await response.json()

    async def everywhere(self, key: str, right: Callable[[int], bool]) -> None:
        """Asks every gateway again until the status is right there."""
        async with asyncio.timeout(100):
            for url in self.up.urls:
                status, *_ = await self.ask(url, key)
                while not right(status):
                    status, *_ = await self.ask(url, key)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    make_checkpoint(tmp_path / "tiny", TINY)
    directory = tmp_path / "data"
    async with running(directory, tmp_path / "tiny", nodes=1, gateways=2) as up:
        assert len(up.urls) == 2
        yield Site(up, directory)


async def test_keys_count_and_end_at_every_gateway_while_they_run(site: Site) -> None:
    await site.everywhere("", lambda status: status == 200)
    await site.run("tenant", "add", "acme", "--weight", "2")
    key = await site.new_key("--tenant", "acme")
    await site.everywhere("", lambda status: status == 401)
    await site.everywhere(key, lambda status: status == 200)

    rotated = (await site.run("key", "rotate", key.split("-")[1], "--grace", "1h")).out.strip()
    await site.everywhere(rotated, lambda status: status == 200)
    await site.everywhere(key, lambda status: status == 200)
    rotated = (await site.run("key", "rotate", key.split("-")[1], "--grace", "0s")).out.strip()
    await site.everywhere(key, lambda status: status == 401)
    await site.everywhere(rotated, lambda status: status == 200)

    await site.run("key", "revoke", key.split("-")[1])
    await site.everywhere(rotated, lambda status: status == 401)
    await site.run("tenant", "rm", "acme")
    (left,) = (await site.run("tenant", "ls", "--json")).document
    assert left["id"] == "default"
    (key_left,) = (await site.run("key", "ls", "--json")).document
    assert (key_left["state"], key_left["tenant"]) == ("revoked", "acme")


async def test_two_gateways_do_not_multiply_a_limit(site: Site) -> None:
    await site.run("tenant", "add", "acme", "--requests-per-min", "5")
    key = await site.new_key("--tenant", "acme")
    await site.everywhere("", lambda status: status == 401)
    one, other = site.up.urls
    asked = [await site.ask(one, key) for _ in range(6)]
    assert [status for status, *_ in asked] == [200] * 5 + [429]
    _, headers, answer = asked[-1]
    assert answer["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(headers["Retry-After"]) <= 12
    left = 5
    while left > 1:  # what the first gateway let in is on its way to the other
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
            http.get(f"{other}/v1/models") as response,
        ):
            left = int(response.headers["x-ratelimit-remaining-requests"])
    assert (await site.ask(other, key))[0] == 429 or left == 1


async def test_what_was_used_is_summed(site: Site) -> None:
    await site.run("tenant", "add", "acme")
    key = await site.new_key("--tenant", "acme")
    await site.everywhere("", lambda status: status == 401)
    await site.everywhere(key, lambda status: status == 200)  # two calls, at least
    _, _, answer = await site.ask(site.up.urls[0], key, n=2)
    assert answer["usage"]["completion_tokens"] == 8
    used: dict[str, Any] = {"calls": 0}
    async with asyncio.timeout(100):
        while used["calls"] < 3:
            ran = await site.run("usage", "--tenant", "acme", "--since", "1h", "--json")
            used = ran.document[0] if ran.document else used
    assert (used["tenant"], used["key"], used["model"]) == ("acme", key.split("-")[1], MODEL)
    assert used["prompt"] == 3 * used["calls"]
    assert used["generated"] == 4 * (used["calls"] - 1) + 8
    assert used["device_s"] > 0
    assert used["kv_gb_s"] > 0
    assert (await site.run("usage", "--model", "other", "--json")).document == []


QUOTA = 20
"""Requests a minute of the tenant that floods a gateway with ten times as many."""
ROOM_MIB = 200.0
"""What the flood may take of the gateway's memory."""


def hostile_bodies() -> Sequence[bytes]:
    """Bodies as large as the gateway takes, which ask for what it refuses."""
    ask = {"model": MODEL, "max_tokens": 1}
    said = [{"role": "user", "content": "a"}]
    return (
        msgspec.json.encode({**ask, "prompt": "hello world " * 86_000}),
        msgspec.json.encode({**ask, "prompt": ["a"] * 260_000}),
        msgspec.json.encode({**ask, "prompt": [1] * 500_000}),
        msgspec.json.encode({**ask, "messages": said * 30_000}),
        b"[" * 1_000_000,
    )


def most_mib(pid: int) -> float:
    """The most resident memory that the process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


async def test_a_tenant_that_floods_a_gateway_changes_no_stream_of_another(
    site: Site, oracle: Oracle
) -> None:
    await site.run("tenant", "add", "calm")
    await site.run("tenant", "add", "loud", "--requests-per-min", str(QUOTA))
    calm = await site.new_key("--tenant", "calm")
    loud = await site.new_key("--tenant", "loud")
    await site.everywhere("", lambda status: status == 401)
    for key in (calm, loud):
        await site.everywhere(key, lambda status: status == 200)
    prompt, count = [5, 6, 7], 300
    right = oracle.tokens([prompt], count)[0]
    before, began = most_mib(site.up.pid("gateway")), time.monotonic()

    async def flood() -> Counter[int]:
        bodies = [msgspec.json.encode(BODY)] * 10 * QUOTA + [*hostile_bodies()] * 4
        headers = {"Authorization": f"Bearer {loud}", "Content-Type": "application/json"}

        async def send(body: bytes) -> int:
            async with http.post("/v1/completions", data=body) as response:
                await response.read()
                return response.status

        async with aiohttp.ClientSession(site.up.url, headers=headers) as http:
            return Counter(await asyncio.gather(*map(send, bodies)))

    flooding = asyncio.create_task(flood())
    answers: list[Answer] = []
    while not flooding.done():
        headers = {"Authorization": f"Bearer {calm}"}
        answers.append(await site.up.ask(prompt, count, headers=headers))
    statuses = await flooding
    assert answers
    assert all((each.tokens, each.finish) == (right, "length") for each in answers)
    assert set(statuses) == {200, 400, 413, 429}
    assert statuses[200] <= QUOTA + 1 + QUOTA / 60 * (time.monotonic() - began)
    assert most_mib(site.up.pid("gateway")) < before + ROOM_MIB
