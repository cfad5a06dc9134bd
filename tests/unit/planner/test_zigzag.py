"""The greedy rule of live scaling against the optimum: all splits, and an integer programme."""

from itertools import product

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from shared.errors import BadInput
from tests.support.zigzag import best_effort, zigzag

SMALL = [(n, layers, load) for n in (1, 2, 3, 4) for layers in (1, 2, 3, 4) for load in (1, 2, 3)]


def finishes(on_target: tuple[int, ...], layers: int, load: int) -> list[int]:
    """The earliest finish of every batch for this split, by BlitzScale's constraints, corrected.

    The source runs the batches in order; it can begin on one once the target has run its part of
    that batch: after layer l is loaded there remain all layers >= l of the batches up to this one.
    """
    finish: list[int] = []
    for batch, own in enumerate(on_target):
        start = finish[-1] if finish else 0
        for layer in range(1, own + 1):
            work = sum(max(0, other - layer + 1) for other in on_target[: batch + 1])
            start = max(start, (layer - 1) * load + work)
        finish.append(start + layers - own)
    return finish


def by_brute_force(batches: int, layers: int, load: int) -> float:
    splits = product(range(layers + 1), repeat=batches)
    return min(sum(finishes(split, layers, load)) for split in splits) / batches


def by_programme(batches: int, layers: int, load: int) -> float:
    """x[i,l] = 1 where the target runs layer l of batch i; s_i: when the source begins on it."""
    n_x = batches * layers
    size = n_x + batches
    rows: list[np.ndarray] = []
    least: list[float] = []

    def at_least(bound: float, terms: dict[int, float]) -> None:
        """sum of terms >= bound"""
        row = np.zeros(size)
        for index, factor in terms.items():
            row[index] += factor
        rows.append(row)
        least.append(bound)

    def x(i: int, layer: int) -> int:
        return i * layers + layer

    horizon = layers * (load + batches)
    for i in range(batches):
        for layer in range(layers - 1):
            at_least(0, {x(i, layer): 1, x(i, layer + 1): -1})
        if i:
            rest: dict[int, float] = {x(i - 1, layer): 1 for layer in range(layers)}
            at_least(layers, {**rest, n_x + i: 1, n_x + i - 1: -1})
        for layer in range(layers):
            work: dict[int, float] = {
                x(j, m): -1 for j in range(i + 1) for m in range(layer, layers)
            }
            work[x(i, layer)] -= horizon
            at_least(layer * load - horizon, {**work, n_x + i: 1})
    cost = np.concatenate([-np.ones(n_x), np.ones(batches)])
    found = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
        integrality=np.concatenate([np.ones(n_x), np.zeros(batches)]),
        bounds=Bounds(0, np.concatenate([np.ones(n_x), np.full(batches, np.inf)])),
    )
    assert found.success
    return float(found.fun) / batches + layers


@pytest.mark.parametrize(("batches", "layers", "load"), SMALL)
def test_no_split_is_better_than_the_rule(batches: int, layers: int, load: int) -> None:
    assert zigzag(batches, layers, load).mean == pytest.approx(
        by_brute_force(batches, layers, load)
    )


@pytest.mark.parametrize(
    "case", [(2, 3, 2), (3, 4, 2), (4, 5, 3), (5, 4, 1), (5, 7, 6), (6, 6, 4), (4, 8, 3)]
)
def test_the_rule_is_the_optimum_of_the_integer_programme(case: tuple[int, int, int]) -> None:
    assert zigzag(*case).mean == pytest.approx(by_programme(*case))


def test_the_paper_s_example() -> None:
    assert zigzag(7, 7, 6).finish == (7, 12, 17, 21, 24, 27, 29)
    assert best_effort(7, 7, 6).finish == (7, 13, 19, 25, 31, 36, 41)


@pytest.mark.parametrize(
    ("layers", "batches", "load", "before", "after"),
    [(32, 6, 6, 109.3, 84.5), (32, 16, 6, 254.6, 153.4), (80, 8, 12, 356.5, 296.5)],
)
def test_mean_latency_of_large_models(
    layers: int, batches: int, load: int, before: float, after: float
) -> None:
    assert best_effort(batches, layers, load).mean == pytest.approx(before, abs=0.05)
    assert zigzag(batches, layers, load).mean == pytest.approx(after, abs=0.05)


@pytest.mark.parametrize(("batches", "layers", "load"), SMALL)
def test_what_the_source_runs_fits_the_finish_times(batches: int, layers: int, load: int) -> None:
    """The finish times are those of the split itself, by the constraints and not by the rule."""
    found = zigzag(batches, layers, load)
    assert sum(found.finish) == sum(finishes(found.on_target, layers, load))


@pytest.mark.parametrize("case", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_below_one_are_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(BadInput):
        zigzag(*case)
    with pytest.raises(BadInput):
        best_effort(*case)
