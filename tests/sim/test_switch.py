"""A path ends since its nodes are complete: what becomes of the requests that are on it."""

from dataclasses import replace

import msgspec
import pytest

from services.gateway.core import model, routing
from services.gateway.core.commands import Resumed
from shared.ids import ModelName
from simulation.chaos import play
from simulation.scenario import Arrival, Scenario
from tests.sim.test_faults import SPEC

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
REQUESTS = tuple(Arrival(1 + 0.02 * number, "model", 100, ANSWER) for number in range(24))


def test_requests_that_stay_end_where_they_are_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stayed, resumed = set[str](), list[str]()

    def stays(
        table: routing.Table, path: routing.Route, target: routing.Route, **_: int
    ) -> routing.Switch:
        stayed.update(path.requests)
        return routing.Switch(stay_s=0.0, move_s=1.0)

    def note(name: ModelName, reason: str, detail: str) -> Resumed:
        resumed.append(reason)
        return Resumed(name, reason, detail)

    monkeypatch.setattr(routing, "switch", stays)
    monkeypatch.setattr(model, "Resumed", note)
    verdict = play(Scenario(0, SLOW, REQUESTS, ()))
    assert not verdict.violations
    assert len(stayed) > 5
    assert set(resumed) <= {"moved"}, "only those without KV leave"
    said = [line.split(maxsplit=1) for line in verdict.log]
    moving = [float(at) for at, what in said if "served by" in what and "moving" in what]
    assert moving[-1] - moving[0] > 30
    assert sum(what.endswith(f"ended, {ANSWER} tokens") for _, what in said) == len(REQUESTS)
