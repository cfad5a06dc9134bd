"""A gateway that the bus is away from, in virtual time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.gateway.core.others import SILENT_S
from services.gateway.service import LOAD_S, GatewayService
from shared import subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBus
from shared.config import GatewayConfig
from shared.ids import GatewayId
from shared.messages.load import GatewayLoad
from shared.messages.serving import GatewayGone
from simulation.bus import SimBroker

pytestmark = pytest.mark.virtual_time

OTHER = GatewayId("gateway-other")


@asynccontextmanager
async def gateway(broker: SimBroker) -> AsyncIterator[tuple[MemoryBus, list[GatewayId]]]:
    """A gateway that knows another. Yields the bus of all others, and of whom the gateway says
    that they are gone."""
    gone: list[GatewayId] = []

    async def hear(message: GatewayGone) -> None:
        gone.append(message.gateway)

    async with (
        MemoryBus(broker, "own") as own,
        MemoryBus(broker, "others") as others,
        GatewayService(own, GatewayConfig(), listen=False),
    ):
        await others.subscribe(subjects.GATEWAYS_GONE, On(GatewayGone, hear))
        await others.publish(subjects.LOAD_GATEWAY, GatewayLoad(gateway=OTHER, models=()))
        await asyncio.sleep(LOAD_S)
        yield others, gone


async def test_a_gateway_that_goes_silent_is_told_of() -> None:
    async with gateway(SimBroker()) as (_, gone):
        await asyncio.sleep(2 * SILENT_S)
        assert gone == [OTHER]


async def test_a_gateway_that_hears_nobody_says_of_nobody_that_he_is_gone() -> None:
    broker = SimBroker()
    async with gateway(broker) as (_, gone):
        broker.fail()
        await asyncio.sleep(2 * SILENT_S)
        assert not gone
        broker.recover()
        await asyncio.sleep(SILENT_S)
        assert not gone
