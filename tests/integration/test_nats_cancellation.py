"""A task that is told to end in the middle of an exchange with NATS ends, at whatever moment."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.local.nats_server import NatsServer
from shared.bus.base import On
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from shared.errors import NoResponders
from shared.messages import Message, Ok, Ping

MOMENTS = 300
"""A cancellation is lost, where it can be, at one moment in six."""


async def request(bus: NatsBus) -> None:
    try:
        await bus.request("nobody", Ping(), Ok, timeout=5.0)
    except NoResponders:
        await asyncio.Event().wait()


async def subscribe(bus: NatsBus) -> None:
    async def ignore(message: Message) -> None:
        pass

    await bus.subscribe("subject", On(Message, ignore))
    await asyncio.Event().wait()


async def write(bus: NatsBus) -> None:
    await (await bus.kv("bucket")).put("key", b"value")
    await asyncio.Event().wait()


@pytest.mark.parametrize("exchange", [request, subscribe, write])
async def test_cancellation_is_never_lost(
    nats_server: NatsServer, exchange: Callable[[NatsBus], Awaitable[None]]
) -> None:
    async with NatsBus(BusConfig(url=nats_server.url), "test") as bus:
        for moment in range(MOMENTS):
            task = asyncio.ensure_future(exchange(bus))
            for _ in range(moment % 30):
                await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait([task])
            assert task.cancelled()
