"""The marker `virtual_time`: a test's own clock, that of its fixtures, and the order of both."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.bus.memory import MemoryBus
from shared.clock import now, wall_ns
from simulation.loop import EPOCH_NS, VirtualLoop


@pytest.fixture
async def begun() -> AsyncIterator[float]:
    await asyncio.sleep(3600)
    yield now()
    await asyncio.sleep(3600)


@pytest.mark.virtual_time
async def test_an_hour_takes_no_time_in_fixtures_either(
    begun: float, memory_bus: MemoryBus
) -> None:
    await asyncio.sleep(1800)
    assert (begun, now()) == (3600, 5400)
    assert wall_ns() == EPOCH_NS + 5400 * 10**9


async def test_others_have_the_clock_of_the_machine() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
    assert abs(wall_ns() - EPOCH_NS) > 10**15
