"""The frontier: TTFT against device seconds."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.simulate.sweep import DEFAULT, grid
from simulation.figures import draw_frontier
from simulation.frontier import Knobs, Point, all_knobs, frontier, lines, point, swept, ttft_at
from simulation.measures import measure
from tests.unit.simulation.runs import made_up, setting
from tests.unit.simulation.test_measures import OBJECTIVE


def at(device_s: float, ttft_s: float, system: str = "lambdascale") -> Point:
    return Point(system, Knobs(device_s / 10, 1, 0.5), device_s, ttft_s)


POINTS = (at(200, 1.0), at(100, 2.0), at(150, 2.5), at(300, 1.0), at(400, 0.5))
"""150 is beaten by 100, and 300 by 200."""


def test_the_frontier_has_the_points_that_none_beats_in_both() -> None:
    assert [each.device_s for each in frontier(POINTS)] == [100, 200, 400]
    assert frontier(()) == ()


@pytest.mark.parametrize(
    ("device_s", "ttft_s"),
    [(99, None), (100, 2.0), (150, 1.5), (200, 1.0), (300, 0.75), (400, 0.5), (900, 0.5)],
)
def test_between_its_points_the_frontier_is_straight(device_s: float, ttft_s: float | None) -> None:
    assert ttft_at(POINTS, device_s) == ttft_s


def test_points_of_a_run() -> None:
    run = made_up("lambdascale")
    measures = measure(run, OBJECTIVE, run.virtual_s)
    (knobs,) = all_knobs((2.0,), (1,), (None,), 0.5)
    found = point("lambdascale", knobs, measures)
    assert found is not None
    assert found.device_s == measures.gpu_seconds
    assert found.ttft_s * 1000 == measures.ttft_ms.p90
    lost = replace(measures, completed=measures.requests - 1)
    assert point("lambdascale", knobs, lost) is None  # what was lost may have waited longest


def test_a_table_a_document_and_a_figure(tmp_path: Path) -> None:
    points = [*POINTS, at(50, 9.0, "ideal")]
    table = list(lines(points))
    assert [line.endswith("*") for line in table[1:6]] == [True, False, True, False, True]
    assert table[6].startswith("ideal")
    found = swept(setting(), points)
    assert isinstance(found["points"], list)
    assert [each["frontier"] for each in found["points"]] == [True, True, False, False, True, True]
    assert found["points"][0]["knobs"]["keep_alive_s"] == 20.0
    assert draw_frontier(tmp_path, setting(), points).stat().st_size > 10_000


def test_an_objective_is_every_models() -> None:
    base = replace(setting(), objectives=(("llama-2-13b", 9.0, 0.1),))
    (as_it_is, none, half) = all_knobs((2.0,), (1,), (None, 0.0, 500.0), 0.5)
    assert as_it_is.on(base).objectives == base.objectives
    assert none.on(base).objectives == (("llama-2-13b", 0.0, 0.0),)
    assert half.on(base).objectives == (("llama-2-13b", 0.5, 0.0),)
    assert half.words == "2 s, 1, 500 ms"


def test_the_grid_of_a_sweep() -> None:
    assert grid("0,2.5:1") == ((0.0, 2.5), (1,), (None,))
    assert grid(DEFAULT)[2] == (0.0, 500.0, 1000.0)
    for wrong in ("2", "2:", ":1", "x:1", "1:0.5", "-1:1", "1:1:x", "1:1:1:1", "1:1:"):
        with pytest.raises(argparse.ArgumentTypeError):
            grid(wrong)
