"""Requests to the API, and the events of a stream."""

import json
from typing import Any

import aiohttp

from tests.unit.gateway.support import NAME


async def post(
    http: aiohttp.ClientSession, body: dict[str, Any], route: str = "completions", **headers: str
) -> tuple[int, dict[str, Any]]:
    async with http.post(f"/v1/{route}", json=body, headers=headers) as response:
        return response.status, await response.json()


async def events(http: aiohttp.ClientSession, body: dict[str, Any], route: str) -> list[Any]:
    """The stream's events, [DONE] included."""
    async with http.post(f"/v1/{route}", json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = await response.text()
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part.startswith("data")]
    assert found[-1] == "[DONE]"
    return [json.loads(event) for event in found[:-1]]


ASK = {"model": NAME, "prompt": "say hello", "max_tokens": 50}


CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
