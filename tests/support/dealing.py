"""How the files of tests are dealt to the processes that run them (`./lambdascale test`).

Some tests wait most of the time, for processes that they have started; the others compute. If all
processes did first this and then that, processors would be idle first and then wanted by all. So
WAITERS of the processes begin with tests that wait, the longest first, and the others with tests
that compute. Whoever has none left of its own takes from the others. The processes that compute
stand back (`nice`): what others wait for gets the processors as if nothing else ran.
"""

import os
from collections.abc import Iterable

import pytest

WAITERS = 3
"""Each of them keeps a processor busy for about a third of the time."""
WAIT = (
    "tests/rdma/",
    "tests/integration/test_bench_chaos.py",
    "tests/integration/test_cluster.py",
    "tests/integration/test_disks.py",
    "tests/integration/test_cli.py",
    "tests/integration/test_durable_copies.py",
    "tests/unit/gateway/test_boundary.py",
    "tests/integration/",
    "tests/unit/node/transport/",
    "tests/contract/",
)
"""Tests that wait: what is named first begins first."""
LONG = ("tests/sim/", "tests/unit/node/engine/")
"""The first of those that compute, so that no long one is left for the end."""
NICE = 5


def waits(test: str) -> bool:
    return test.startswith(WAIT)


def is_waiter(process: int) -> bool:
    """`process`: its number, from 0."""
    return process < WAITERS


class Dealing:
    """The files that no process has taken. The tests of a file stay in one process, so that they
    share its fixtures."""

    def __init__(self, files: Iterable[str]) -> None:
        self._left = list(files)

    def take(self, process: int) -> str | None:
        """The next file for this process. None: all are dealt."""
        if not self._left:
            return None
        own = is_waiter(process)
        file = next((file for file in self._left if waits(file) == own), self._left[0])
        self._left.remove(file)
        return file


def in_order(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        begins = (item.nodeid.startswith(named) for named in (*WAIT, *LONG))
        return next((place for place, first in enumerate(begins) if first), len(WAIT) + len(LONG))

    items.sort(key=place)


def stand_back(process: int) -> None:
    if not is_waiter(process):
        os.nice(NICE)
