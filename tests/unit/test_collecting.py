"""Processes that collect the same tests: the first does so alone, the others then side by side."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support import collecting


@pytest.fixture
def run() -> Iterator[str]:
    run = uuid.uuid4().hex
    yield run
    collecting.forget(run)


def test_the_first_collects_alone_and_the_others_at_once(run: str) -> None:
    began = threading.Semaphore(0)

    def collect() -> None:
        with collecting.in_turn(run):
            began.release()

    with collecting.in_turn(run):
        others = [threading.Thread(target=collect) for _ in range(3)]
        for other in others:
            other.start()
        assert not began.acquire(timeout=0.05)
    for other in others:
        other.join()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(collecting.in_turn(run))


def test_one_that_fails_leaves_its_place_to_the_next(run: str) -> None:
    with pytest.raises(KeyError), collecting.in_turn(run):
        raise KeyError
    with collecting.in_turn(run):
        pass
