"""Numbers that never come twice, from counters in the durable store: generations and epochs.

A process that starts takes the next number of its name, and every message from it carries that
number. So a receiver that hears two processes of one name knows which is the later one. The clock
is not used, because a process on a host whose clock is behind would be taken for an older process
and ignored.
"""

from shared.bus.base import KeyValue
from shared.errors import BusError, KeyExists

FIRST = 4 * 10**18
"""Counters begin here. It is more than the wall-clock nanoseconds (1.8e18 in 2026) that earlier
releases used as generations and epochs, so that a process of this release counts as the later
one."""


async def next_number(counters: KeyValue, name: str, *, above: int = 0) -> int:
    """Takes the next number of `name`, greater than all taken before and than `above`.

    `counters` is the bucket `subjects.KV_COUNTERS`. A number may be left out (because the caller
    died or got no answer), but none is given twice. BusError: the store does not answer, or holds
    something else under the name.
    """
    while True:
        entry = await counters.get(name)
        last = FIRST if entry is None else _number(name, entry.value)
        number = max(last, above) + 1
        value = str(number).encode()
        try:
            if entry is None:
                await counters.create(name, value)
            else:
                await counters.update(name, value, entry.revision)
        except KeyExists:  # another process was faster, and takes the number
            continue
        return number


async def last_number(counters: KeyValue, name: str) -> int:
    """The number of `name` that was last taken. If none was, a number below all that will be
    taken."""
    entry = await counters.get(name)
    return FIRST if entry is None else _number(name, entry.value)


def _number(name: str, value: bytes) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise BusError(f"counter {name} holds {value!r}, which is no number: delete it") from error
