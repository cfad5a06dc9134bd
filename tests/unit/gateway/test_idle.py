"""A gateway without requests looks about rarely, and a request finds it awake."""

import asyncio

import pytest

from services.gateway.core.commands import Command
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.requests import Request
from services.gateway.service import IDLE_TICK_S, LOAD_S, TICK_S, GatewayService
from shared import subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.clock import now
from shared.config import GatewayConfig
from shared.ids import ModelId, ModelName, RequestId
from shared.messages.load import WHOLE_S, GatewayLoad
from shared.messages.serving import Sampling

pytestmark = pytest.mark.virtual_time

MODEL = ModelId("model-1")
LOOK_S = 20.0


class CountingDispatch(Dispatch):
    ticks = 0

    def on_tick(self, now: float) -> list[Command]:
        type(self).ticks += 1
        return super().on_tick(now)


class CountedGateway(GatewayService):
    dispatch_type = CountingDispatch


async def test_it_looks_about_rarely_until_a_request_comes() -> None:
    broker = MemoryBroker()
    reported: list[tuple[float, GatewayLoad]] = []

    async def hear(load: GatewayLoad) -> None:
        reported.append((now(), load))

    async with (
        MemoryBus(broker, "gateway") as bus,
        MemoryBus(broker, "planner") as planner,
        CountedGateway(bus, GatewayConfig(), listen=False) as gateway,
    ):
        await planner.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
        gateway._dispatch.add_model(ModelName("tiny"), MODEL)
        await asyncio.sleep(1.0)

        CountingDispatch.ticks = 0
        reported.clear()
        await asyncio.sleep(LOOK_S)
        assert CountingDispatch.ticks <= LOOK_S / IDLE_TICK_S + 1
        assert LOOK_S / WHOLE_S - 2 <= len(reported) <= LOOK_S / WHOLE_S + 1
        assert not any(load.models for _, load in reported)

        await asyncio.sleep(0.3 * WHOLE_S)  # not when it looks about in any case
        CountingDispatch.ticks = 0
        reported.clear()
        began = now()
        request = Request(
            id=RequestId("request-1"),
            model_id=MODEL,
            prompt=(1, 2, 3),
            max_tokens=4,
            stop_ids=(),
            sampling=Sampling(),
            waiting_since=began,
        )
        gateway.frontend.begin({request: lambda piece: None})
        await asyncio.sleep(LOAD_S)
        at, first = next((at, load) for at, load in reported if load.models)
        assert first.models[0].queued_requests == 1
        assert at - began < LOAD_S / 10, "it waits, and that is said at once"
        await asyncio.sleep(LOOK_S - LOAD_S)
        assert CountingDispatch.ticks >= LOOK_S / TICK_S - 2

        gateway.frontend.end([request])
        await asyncio.sleep(2 * LOAD_S)
        assert reported[-1][1].models[0].queued_requests == 0
        assert at < reported[-1][0]


@pytest.mark.parametrize("turns", range(4))
async def test_a_gateway_that_ends_when_a_request_comes_ends(turns: int) -> None:
    async with (
        MemoryBus(MemoryBroker(), "gateway") as bus,
        GatewayService(bus, GatewayConfig(), listen=False) as gateway,
    ):
        waiting = asyncio.create_task(gateway._busy(within_s=10.0))
        await asyncio.sleep(0)
        gateway.frontend.busy.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        over = waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() or over
