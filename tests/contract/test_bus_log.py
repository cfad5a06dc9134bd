"""What every bus promises of logs."""

import pytest

from shared.bus.base import Bus, Log
from shared.clock import wall_ns
from shared.errors import MessageTooLarge

KEEP_S, MOST = 3600.0, 1 << 20


async def opened(bus: Bus, max_bytes: int = MOST) -> Log:
    return await bus.open_log("test", keep_s=KEEP_S, max_bytes=max_bytes)


async def read(log: Log, since_ns: int = 0) -> list[bytes]:
    return [entry async for entry in log.since(since_ns)]


async def test_entries_are_read_in_order_by_others(bus: Bus, other: Bus) -> None:
    log = await opened(bus)
    assert await read(log) == []
    for number in range(100):
        await log.append(b"%d" % number, id=f"id-{number}")
    assert await read(await opened(other)) == [b"%d" % number for number in range(100)]


async def test_an_entry_that_is_added_twice_is_there_once(bus: Bus) -> None:
    log = await opened(bus)
    for _ in range(2):
        await log.append(b"a", id="one")
    await log.append(b"a", id="two")
    assert await read(log) == [b"a", b"a"]


async def test_only_what_was_added_since_is_read(bus: Bus) -> None:
    log = await opened(bus)
    await log.append(b"before", id="1")
    (_,) = await read(log, wall_ns() - 10**9)
    assert await read(log, wall_ns() + 3600 * 10**9) == []


async def test_the_oldest_go_where_there_is_no_more_room(bus: Bus) -> None:
    log = await opened(bus, max_bytes=20_000)
    for number in range(100):
        await log.append(bytes([number]) * 1000, id=str(number))
    left = await read(log)
    assert 5 < len(left) < 25
    assert left[-1][0] == 99
    assert [entry[0] for entry in left] == list(range(100 - len(left), 100))


async def test_an_entry_that_is_too_large_is_refused(bus: Bus) -> None:
    with pytest.raises(MessageTooLarge):
        await (await opened(bus)).append(bytes(9 << 20), id="1")
