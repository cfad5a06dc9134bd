"""What nats-servers that have just formed a cluster do to the first calls: a bucket says who leads
it, and answers nothing yet; a write finds nobody; a server has not heard of the others.

Real servers do so only on a machine that is busy. Here a real server's client loses these calls.
"""

import asyncio
from typing import Any

import nats.js.errors
import pytest

from services.local.nats_server import NatsServer
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import KeyExists

WAIT_S = 60.0


class Young:
    """A JetStream client whose first calls of some kinds fail."""

    def __init__(self, client: Any, **lost: Exception | None) -> None:
        """`lost`: the error of each kind of call; None: it is never answered."""
        self._client = client
        self._lost = lost
        self.asked: list[str] = []

    def __getattr__(self, kind: str) -> Any:
        call = getattr(self._client, kind)

        async def first(*args: Any, **named: Any) -> Any:
            self.asked.append(kind)
            if kind not in self._lost:
                return await call(*args, **named)
            error = self._lost.pop(kind)
            if error is None:
                await asyncio.Event().wait()
            raise error or AssertionError

        return first


def young(bus: NatsBus, **lost: Exception | None) -> Young:
    connection = bus._connection
    connection.jetstream = found = Young(connection.jetstream, **lost)
    return found


@pytest.fixture
def config(nats_server: NatsServer) -> BusConfig:
    return BusConfig(url=nats_server.url)


async def test_a_read_that_is_not_answered_is_asked_again(config: BusConfig) -> None:
    async with NatsBus(config, "one") as bus, asyncio.timeout(WAIT_S):
        bucket = await bus.kv("bucket")
        await bucket.put("key", b"value")
        calls = young(bus, get_msg=None)
        found = await bucket.get("key")
        assert found is not None
        assert found.value == b"value"
        assert calls.asked == ["get_msg"] * 2


async def test_a_write_that_nobody_takes_is_written_again(config: BusConfig) -> None:
    async with NatsBus(config, "one") as bus, asyncio.timeout(WAIT_S):
        bucket = await bus.kv("bucket")
        calls = young(bus, publish=nats.js.errors.NoStreamResponseError())
        await bucket.create("key", b"value")
        assert calls.asked == ["publish"] * 2
        with pytest.raises(KeyExists):
            await bucket.create("key", b"other")


async def test_a_bucket_is_made_once_enough_servers_are_there(config: BusConfig) -> None:
    async with NatsBus(config, "one") as bus, asyncio.timeout(WAIT_S):
        why = nats.js.errors.BadRequestError(
            code=400, err_code=10005, description="no suitable peers for placement"
        )
        calls = young(bus, create_key_value=why)
        await (await bus.kv("bucket")).create("key", b"value")
        assert calls.asked.count("create_key_value") == 2
