"""Which process runs which tests, and in which order."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.support.dealing import NICE, WAITERS, Dealing, in_order, stand_back

WAIT = [f"tests/integration/test_{n}.py" for n in range(2 * WAITERS)]
COMPUTE = [f"tests/unit/test_{n}.py" for n in range(2 * WAITERS)]


def test_those_that_wait_and_those_that_compute_go_on_side_by_side() -> None:
    dealing = Dealing(WAIT + COMPUTE)
    taken = [dealing.take(process) for process in range(WAITERS + 2)]
    assert taken == [*WAIT[:WAITERS], *COMPUTE[:2]]


def test_whoever_has_none_left_takes_from_the_others() -> None:
    dealing = Dealing(WAIT + COMPUTE)
    assert dealing.take(0) == WAIT[0]
    rest = [dealing.take(WAITERS) for _ in range(len(WAIT + COMPUTE) - 1)]
    assert rest == [*COMPUTE, *WAIT[1:]]
    assert dealing.take(0) is dealing.take(WAITERS) is None


def test_all_that_waits_comes_first_for_one_process() -> None:
    dealing = Dealing(COMPUTE + WAIT)
    assert [dealing.take(0) for _ in COMPUTE + WAIT] == [*WAIT, *COMPUTE]


def test_what_takes_longest_comes_first() -> None:
    names = [
        *("tests/unit/a.py", "tests/unit/node/engine/b.py", "tests/sim/c.py"),
        *("tests/contract/d.py", "tests/integration/e.py", "tests/rdma/f.py"),
    ]
    items = [SimpleNamespace(nodeid=name) for name in names]
    in_order(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == list(reversed(names))


@pytest.mark.parametrize(("process", "nice"), [(0, []), (WAITERS - 1, []), (WAITERS, [NICE])])
def test_those_that_compute_stand_back(
    monkeypatch: pytest.MonkeyPatch, process: int, nice: list[int]
) -> None:
    said: list[int] = []
    told: Callable[[int], None] = said.append
    monkeypatch.setattr(os, "nice", told)
    stand_back(process)
    assert said == nice
