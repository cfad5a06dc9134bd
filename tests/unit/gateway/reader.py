"""A streaming client, and nodes with a known text."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from shared.messages.serving import Submit
from tests.unit.gateway.support import NAME, Cluster, ScriptedNode, ids_of

TEXT = "the quick brown fox jumps over the lazy dog, twice"
ASK = {"model": NAME, "prompt": "go on", "max_tokens": 200}


def scripted(submit: Submit) -> Sequence[int]:
    return ids_of(TEXT)


class Reader:
    """A streaming client that can be waited for."""

    def __init__(self, cluster: Cluster, body: dict[str, Any] | None = None, key: str = "") -> None:
        """`key`: an idempotency key."""
        self._url = f"{cluster.service.url}/v1/completions"
        self._body = {**ASK, **(body or {}), "stream": True}
        self._sends = {"Idempotency-Key": key} if key else {}
        self._changed = asyncio.Condition()
        self.text = ""
        self.raw = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.error: dict[str, Any] | None = None
        self.finish: str | None = None

    async def read(self) -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._url, json=self._body, headers=self._sends) as response,
        ):
            self.status, self.headers = response.status, dict(response.headers)
            async for line in response.content:
                async with self._changed:
                    self.raw += line
                    self._changed.notify_all()
                if line.startswith(b"data: {"):
                    await self._take(json.loads(line[6:]))
        if self.status != 200:
            self.error = json.loads(self.raw)["error"]
        return self.text

    async def _take(self, event: dict[str, Any]) -> None:
        async with self._changed:
            if "error" in event:
                self.error = event["error"]
            else:
                self.text += event["choices"][0]["text"]
                self.finish = event["choices"][0]["finish_reason"]
            self._changed.notify_all()

    async def until_spoken_to(self) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: self.raw)

    async def until(self, length: int) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self.text) >= length)


async def nodes_of(cluster: Cluster, *numbers: int, pause_at: int | None) -> list[ScriptedNode]:
    nodes = [await cluster.node(number) for number in numbers]
    for node in nodes:
        node.script, node.pause_at = scripted, pause_at
    return nodes
