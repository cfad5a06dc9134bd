"""The greedy rule at any times is the rule in units of layers, which tests compare with solvers."""

import pytest

from simulation.zigzag import finishes
from tests.support.zigzag import zigzag

CASES = [(n, layers, load) for n in (1, 2, 5, 16) for layers in (1, 4, 7) for load in (1, 3, 6)]


@pytest.mark.parametrize(("batches", "layers", "load"), CASES)
def test_alike_layers(batches: int, layers: int, load: int) -> None:
    found = finishes(batches, [1.0] * layers, [load * layer for layer in range(layers)])
    assert found == list(zigzag(batches, layers, load).finish)


def test_without_a_target_the_source_runs_one_batch_after_the_other() -> None:
    never = float("inf")
    assert finishes(3, [1.0, 0.5], [never, never]) == [1.5, 3.0, 4.5]


def test_blocks_differ() -> None:
    """The target has run the first block of the second batch when the source comes to it."""
    assert finishes(2, [2.0, 1.0], [0.0, 10.0]) == [3.0, 4.0]
