"""Streams of requests with an idempotency key: their events, with ids, as far as a client reads."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

LIMIT_S = 200.0


@dataclass
class Event:
    id: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def choices_of(events: list[Event]) -> list[dict[str, Any]]:
    return [c for event in events if event.data != "[DONE]" for c in event.json["choices"]]


async def read_stream(
    url: str,
    body: dict[str, Any],
    headers: Mapping[str, str],
    *,
    route: str,
    last: str = "",
    most: int = 1 << 30,
    into: list[Event] | None = None,
) -> list[Event]:
    """The first `most` events of a stream, which is then left; what came of it if it breaks off.
    `last`: the id of the last event that the client has."""
    if last:
        headers = {**headers, "Last-Event-ID": last}
    found = [] if into is None else into
    async with (
        asyncio.timeout(LIMIT_S),
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/{route}", json={**body, "stream": True}, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        event = ""
        try:
            async for raw in response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith("id: "):
                    event = line[4:]
                elif line.startswith("data: "):
                    found.append(Event(event, line[6:]))
                    event = ""
                    if len(found) == most:
                        break
        except aiohttp.ClientPayloadError:
            pass  # the gateway died
    return found
