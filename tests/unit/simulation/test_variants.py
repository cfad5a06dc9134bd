"""Workloads made from a recorded one."""

import pytest

from shared.errors import BadInput
from simulation.traces import Row, Workload
from simulation.variants import JITTER_S, jittered, streams

RECORDED = Workload("w.csv", tuple(Row(float(at), at + 1, 2, "m") for at in range(10)), ("fitted",))


def test_seed_0_is_the_workload_as_it_was_recorded() -> None:
    assert jittered(RECORDED, 0) is RECORDED


def test_other_seeds_move_arrivals_a_little_and_nothing_else() -> None:
    moved = jittered(RECORDED, 1)
    assert moved != jittered(RECORDED, 2)
    assert moved == jittered(RECORDED, 1)
    arrivals = [row.arrival_s for row in moved.rows]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    for row, before in zip(moved.rows, RECORDED.rows, strict=True):
        assert row.arrival_s != before.arrival_s or before.arrival_s == 0
        assert abs(row.arrival_s - before.arrival_s) <= JITTER_S
        assert row.prompt_tokens == before.prompt_tokens
    assert moved.notes == ("fitted", "arrivals moved by up to 0.25 s either way (seed 1)")


def test_each_stream_has_every_request_shifted_in_time() -> None:
    made = streams(RECORDED, 5, 10.0)
    assert made.models == tuple(f"stream-{i}" for i in range(5))
    assert [row.arrival_s for row in made.rows] == sorted(row.arrival_s for row in made.rows)
    for index in range(5):
        own = [row for row in made.rows if row.model == f"stream-{index}"]
        assert [row.prompt_tokens for row in own] == [(at + 2 * index) % 10 + 1 for at in range(10)]
    assert "5 models" in made.notes[-1]


@pytest.mark.parametrize(("count", "length_s"), [(0, 10.0), (2, 9.0)])
def test_streams_that_are_impossible(count: int, length_s: float) -> None:
    with pytest.raises(BadInput):
        streams(RECORDED, count, length_s)
