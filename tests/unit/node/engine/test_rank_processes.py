"""The processes of ranks: what they are forked from, and how their end is told."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.node.engine.rank_processes import RankProcesses
from services.node.engine.rank_server import SERVER
from services.node.engine.ranks import Ranks
from services.node.memory.arena import Arena
from shared.errors import EngineFailed

LIMIT_S = 60.0
VARIABLE = "LAMBDASCALE_OF_A_TEST"
compiles = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


def status(pid: int, field: str) -> str:
    return Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]


@pytest.fixture
def pair() -> Iterator[list[Ranks]]:
    made = [Ranks((degree,), Arena(1 << 20).memory) for degree in (3, 2)]
    for ranks in made:
        ranks.start(threads=1, form="packed", kept_bytes=0)
    yield made
    for ranks in made:
        ranks.close()


@compiles
def test_all_ranks_of_a_process_are_forked_from_one(pair: list[Ranks]) -> None:
    processes = [pid for ranks in pair for pid in ranks.processes]
    assert len(processes) == 3
    assert {int(status(pid, "PPid")) for pid in processes} == {SERVER.start()}
    assert status(SERVER.start(), "Threads") == "1"
    assert [status(pid, "Name") for pid in processes] == ["rank-1", "rank-2", "rank-1"]


@compiles
def test_ranks_end_with_what_they_were_forked_from_and_the_next_have_another(
    pair: list[Ranks],
) -> None:
    before = SERVER.start()
    os.kill(before, signal.SIGKILL)
    end = time.monotonic() + LIMIT_S
    while not all(ranks.broken for ranks in pair):
        assert time.monotonic() < end
        time.sleep(0.001)
    assert all("ended with signal 9" in ranks.broken for ranks in pair)
    with pytest.raises(EngineFailed, match="signal 9"):
        pair[0].hear()
    other = Ranks((2,), Arena(1 << 20).memory)
    other.start(threads=1, form="packed", kept_bytes=0)
    (rank,) = other.processes
    assert int(status(rank, "PPid")) == SERVER.start() != before
    other.close()


def test_any_module_can_be_a_rank_and_how_it_ended_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SERVER.start()
    monkeypatch.setenv(VARIABLE, "3")  # after the start of what it is forked from
    processes = RankProcesses(2, Arena(1 << 20).memory)
    processes._start("tests.support.forked_rank", [VARIABLE], [])
    (rank,) = processes.processes
    with pytest.raises(EngineFailed) as raised:
        processes.hear()
    assert f"its rank 1 (process {rank}) ended with exit code 3" in str(raised.value)
    processes.close()


def test_a_rank_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVER, "_modules", ("tests.there_is_no_such_module",))
    SERVER.stop()
    processes = RankProcesses(2, Arena(1 << 20).memory)
    with pytest.raises(EngineFailed, match="rank 1 cannot be started: the process that ranks"):
        processes._start("tests.support.forked_rank", [VARIABLE], [])
    assert processes.processes == ()
