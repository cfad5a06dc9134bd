"""Counters: every bus gives each number once, to whoever asks."""

import asyncio

import pytest

from shared.bus.base import Bus
from shared.counters import last_number, next_number
from shared.errors import BusError
from shared.subjects import KV_COUNTERS


async def test_numbers_count_up_by_name_and_outlive_the_process(bus: Bus, other: Bus) -> None:
    mine, theirs = await bus.kv(KV_COUNTERS), await other.kv(KV_COUNTERS)
    first = await next_number(mine, "node.a")
    assert await next_number(theirs, "node.a") == first + 1
    assert await next_number(mine, "node.a") == first + 2
    assert await next_number(mine, "planner") == first
    assert await last_number(theirs, "node.a") == first + 2


async def test_no_number_is_given_twice(bus: Bus, other: Bus) -> None:
    buckets = [await bus.kv(KV_COUNTERS), await other.kv(KV_COUNTERS)]
    taken = await asyncio.gather(*(next_number(bucket, "planner") for bucket in buckets * 8))
    assert sorted(taken) == list(range(min(taken), min(taken) + 16))


async def test_a_number_is_greater_than_what_it_must_exceed(bus: Bus) -> None:
    """The store was lost, and a process lives that knows a greater number."""
    counters = await bus.kv(KV_COUNTERS)
    far = await last_number(counters, "node.a") + 1000
    assert await next_number(counters, "node.a", above=far) == far + 1
    assert await next_number(counters, "node.a") == far + 2


async def test_a_counter_that_holds_no_number_is_an_error_that_says_so(bus: Bus) -> None:
    counters = await bus.kv(KV_COUNTERS)
    await counters.create("planner", b"many")
    with pytest.raises(BusError, match="counter planner holds b'many'"):
        await next_number(counters, "planner")
