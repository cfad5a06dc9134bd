"""Which process runs which tests, and in which order."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.support.dealing import NICE, WAITERS, Dealing, in_order, stand_back

FILES = 3 * WAITERS
"""More of each kind than are dealt at once."""
WAIT = [f"tests/integration/test_{n}.py::test_{part}" for n in range(FILES) for part in range(2)]
COMPUTE = [f"tests/unit/test_{n}.py::test_{part}" for n in range(FILES) for part in range(2)]


class Worker:
    """A process that runs what it is given, as far as the scheduler sees it."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def files(worker: Worker, tests: list[str]) -> list[str]:
    return list(dict.fromkeys(tests[index].split("::")[0] for index in worker.given))


def dealt(tests: list[str], workers: int) -> tuple[Dealing, list[Worker]]:
    config = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False),
        getvalue=lambda _: ["popen"] * workers,
    )
    scheduler, nodes = Dealing(config), [Worker(number) for number in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, tests)
    scheduler.schedule()
    return scheduler, nodes


def run(scheduler: Dealing, node: Worker, count: int) -> None:
    for index in node.given[:count]:
        scheduler.mark_test_complete(node, index)


def test_those_that_wait_and_those_that_compute_go_on_side_by_side() -> None:
    tests = WAIT + COMPUTE
    _, nodes = dealt(tests, WAITERS + 2)
    for node, kind in zip(nodes, ("integration",) * WAITERS + ("unit",) * 2, strict=True):
        assert files(node, tests)
        assert all(kind in file for file in files(node, tests))


def test_whoever_has_none_left_takes_from_the_others() -> None:
    tests = WAIT + COMPUTE
    scheduler, nodes = dealt(tests, WAITERS + 1)
    last = nodes[-1]
    done = 0
    while done < len(last.given):
        done += 1
        run(scheduler, last, done)
    found = files(last, tests)
    assert found[:FILES] == [f"tests/unit/test_{n}.py" for n in range(FILES)]
    assert f"tests/integration/test_{FILES - 1}.py" in found
    assert last.shutting_down
    others = [file for node in nodes[:-1] for file in files(node, tests)]
    assert sorted(found + others) == sorted({test.split("::")[0] for test in tests})


def test_all_that_waits_comes_first_for_one_process() -> None:
    tests = COMPUTE + WAIT
    scheduler, (only,) = dealt(tests, 1)
    done = 0
    while done < len(only.given):
        done += 1
        run(scheduler, only, done)
    assert ["integration" in file for file in files(only, tests)] == [True] * FILES + [
        False
    ] * FILES


def test_what_takes_longest_comes_first() -> None:
    names = [
        *("tests/unit/a.py", "tests/unit/node/engine/b.py", "tests/sim/c.py"),
        *("tests/contract/d.py", "tests/integration/e.py", "tests/rdma/f.py"),
    ]
    items = [SimpleNamespace(nodeid=name) for name in names]
    in_order(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == list(reversed(names))


@pytest.mark.parametrize(
    ("worker", "nice"), [("gw0", []), (f"gw{WAITERS - 1}", []), (f"gw{WAITERS}", [NICE])]
)
def test_those_that_compute_stand_back(
    monkeypatch: pytest.MonkeyPatch, worker: str, nice: list[int]
) -> None:
    said: list[int] = []
    told: Callable[[int], None] = said.append
    monkeypatch.setattr(os, "nice", told)
    stand_back(worker)
    assert said == nice
