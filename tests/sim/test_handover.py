"""Requests leave their paths with their KV, whatever happens meanwhile."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest

from services.node.core.handover import Takings
from services.node.core.kv import PAGE
from services.node.core.rows import SequenceKey
from simulation.chaos import play
from simulation.faults import Corrupt, Crash, Fault, PeerCut, Whom
from simulation.scenario import Arrival, Scenario
from tests.sim.test_faults import SPEC
from tests.support.amounts import cases

ON_TARGETS = replace(SPEC.system, serving="pools-only-targets")
"""Leaders of paths lack blocks until all is there. One that does not goes on alone, with its KV."""
MOVES = replace(SPEC, kv_moves="always", system=ON_TARGETS)
REQUESTS = tuple(Arrival(1 + 0.02 * number, "model", 30, 200) for number in range(24))
SWITCH_S, AMID_S = 7.477, 7.62
"""When the paths end, and nothing has been read yet; and when some of the requests have moved."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many takings that asked for KV ended with it, and without it."""
    return watched(monkeypatch, lambda received: received > 0)


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many ended with more than whole pages, and with no more."""
    return watched(monkeypatch, lambda received: received % PAGE > 0)


def watched(monkeypatch: pytest.MonkeyPatch, what: Callable[[int], bool]) -> Counter[bool]:
    found: Counter[bool] = Counter()
    end = Takings.end

    def watch(self: Takings, key: SequenceKey) -> int | None:
        asks = key in self._takings and self._takings[key].end > 0
        received = end(self, key)
        if received is not None and asks:
            found[what(received)] += 1
        return received

    monkeypatch.setattr(Takings, "end", watch)
    return found


def right(*faults: Fault) -> None:
    """Every request gets its tokens, and no invariant is violated."""
    verdict = play(Scenario(0, MOVES, REQUESTS, faults))
    assert not verdict.violations
    ended = [line for line in verdict.log if line.endswith("ended, 200 tokens")]
    assert len(ended) == len(REQUESTS)


def test_requests_move_with_their_kv_when_their_path_ends(
    ends: Counter[bool], beyond: Counter[bool]
) -> None:
    right()
    assert ends[True] > 5
    assert not ends[False]
    assert beyond[True] > 5


@pytest.mark.parametrize("node", cases(["node-0", "node-1"], thorough=["node-2"]))
def test_nodes_die_while_kv_moves(ends: Counter[bool], node: str) -> None:
    right(Crash(at=AMID_S, lasts=6, whom=Whom(None, node)))
    assert ends[True]


def test_wrong_bytes_are_no_kv(ends: Counter[bool]) -> None:
    nodes = [Whom(None, f"node-{number}") for number in range(SPEC.nodes)]
    right(*(Corrupt(at=SWITCH_S, lasts=0, whom=node, reads=4) for node in nodes))
    assert ends[False]


def test_who_cannot_be_reached_lends_nothing(ends: Counter[bool]) -> None:
    names = [f"node-{number}" for number in range(3)]
    pairs = combinations(names, 2)
    right(*(PeerCut(at=SWITCH_S, lasts=5, whom=Whom(None, one), other=two) for one, two in pairs))
    assert ends[True] + ends[False]
