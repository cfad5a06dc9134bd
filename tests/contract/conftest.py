"""The buses under contract, each as a way to open any number of them on one medium."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.local.nats_server import NatsServer
from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.nats import NatsBus
from shared.config import BusConfig
from simulation.bus import SimBroker

OpenBus = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["memory", "simulated", "nats"])
async def open_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenBus]:
    """Opens another bus under the given name; all are closed at the end of the test."""
    async with AsyncExitStack() as opened:
        if request.param == "nats":
            server = await opened.enter_async_context(NatsServer(tmp_path / "nats"))

            def make(name: str) -> Bus:
                return NatsBus(BusConfig(url=server.url), name)

        else:
            broker = MemoryBroker() if request.param == "memory" else SimBroker(jitter_s=0.001)

            def make(name: str) -> Bus:
                return MemoryBus(broker, name)

        async def open_bus(name: str) -> Bus:
            return await opened.enter_async_context(make(name))

        yield open_bus


@pytest.fixture
async def bus(open_bus: OpenBus) -> Bus:
    return await open_bus("one")


@pytest.fixture
async def other(open_bus: OpenBus) -> Bus:
    return await open_bus("two")
