"""A path ends since its nodes are complete: what becomes of the requests that are on it."""

from dataclasses import dataclass, field, replace

import msgspec
import pytest

from services.gateway.core import routing, setbacks
from services.gateway.core.commands import Resumed
from services.gateway.core.routes import Route
from services.gateway.core.table import Table
from services.node.core.batching import Batcher
from services.node.core.microbatches import Command, Emit, Failed, Failure, Part, Send
from shared.ids import ModelName
from shared.messages.serving import AttemptFailed
from simulation.chaos import play
from simulation.checked import CheckedBatcher
from simulation.cluster import PLANNER
from simulation.faults import Crash, Fault, Restart, Whom
from simulation.scenario import Arrival, Scenario
from tests.sim.test_faults import SPEC
from tests.support.amounts import cases

LAPTOP = SPEC.hardware
SLOW = replace(
    SPEC,
    hardware=msgspec.structs.replace(
        LAPTOP,
        memory_bytes=4 * LAPTOP.memory_bytes,
        hbm_bytes_per_s=LAPTOP.hbm_bytes_per_s / 2,
    ),
)
ANSWER = 300
"""Tokens: more than half a minute's."""
REQUESTS = tuple(Arrival(1 + 0.02 * number, "model", 100, ANSWER) for number in range(14))


@dataclass
class Stays:
    """Gateways let all requests that have KV end where they are."""

    stayed: set[str] = field(default_factory=set)
    resumed: list[str] = field(default_factory=list)
    """Why attempts ended and requests went on."""

    def switch(self, table: Table, path: Route, target: Route, **_: float) -> routing.Switch:
        self.stayed.update(path.requests)
        return routing.Switch(stay_s=0.0, move_s=1.0)

    def note(self, name: ModelName, reason: str, detail: str, cause: str) -> Resumed:
        self.resumed.append(reason)
        return Resumed(name, reason, detail, cause=cause)


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> Stays:
    stays = Stays()
    monkeypatch.setattr(routing, "switch", stays.switch)
    monkeypatch.setattr(setbacks, "Resumed", stays.note)
    return stays


def log_of(*faults: Fault) -> list[tuple[float, str]]:
    """(when, what) of a run in which every request got all its tokens."""
    verdict = play(Scenario(0, SLOW, REQUESTS, faults))
    assert not verdict.violations
    log = [(float(at), what) for at, what in (line.split(maxsplit=1) for line in verdict.log)]
    assert sum(what.endswith(f"ended, {ANSWER} tokens") for _, what in log) == len(REQUESTS)
    return log


def moving(log: list[tuple[float, str]]) -> list[float]:
    """When it was told that paths move."""
    return [at for at, what in log if "served by" in what and "moving" in what]


def test_requests_that_stay_end_where_they_are_however_long_that_takes(stays: Stays) -> None:
    told = moving(log_of())
    assert told[-1] - told[0] > 30
    assert len(stays.stayed) > 5
    assert set(stays.resumed) <= {"moved"}, "only those without KV leave"


@pytest.mark.parametrize("node", cases(["node-1"], thorough=["node-0"]))
def test_a_node_dies_while_requests_stay_on_a_path_over_it(stays: Stays, node: str) -> None:
    told = moving(log_of(Crash(at=20, lasts=6, whom=Whom(None, node))))
    assert told[0] < 20 < told[-1]
    assert "gone" in stays.resumed


def test_a_planner_that_does_not_know_a_path_ends_it_and_no_request(stays: Stays) -> None:
    told = moving(log_of(Restart(at=20, lasts=1, role=PLANNER, killed=True)))
    assert told[0] < 20
    assert "gone" in stays.resumed


def test_requests_that_lose_their_kv_on_paths_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes have KV for all of them as they begin, and for few of them as they end."""
    lost: list[str] = []
    no_room = Batcher.no_room

    def watched(self: Batcher, part: Part, why: Failure) -> list[Command]:
        commands = no_room(self, part, why)
        for each in commands:
            if isinstance(each, Emit) and isinstance(each.what, AttemptFailed):
                lost.append(each.what.request)
            if isinstance(each, Send) and isinstance(each.message, Failed):
                lost.extend(each.message.sequences)
        return commands

    monkeypatch.setattr(CheckedBatcher, "no_room", watched)
    requests = tuple(Arrival(1 + 0.02 * number, "model", 20, 300) for number in range(16))
    verdict = play(Scenario(0, SPEC, requests, ()))
    assert not verdict.violations
    assert lost
    assert sum(line.endswith("ended, 300 tokens") for line in verdict.log) == len(requests)
