"""The linear programme of paths against a solver."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from services.planner.core.classes import Freest
from services.planner.core.packing import Packing

NODES = 5

columns = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, NODES - 1), st.integers(1, 8), min_size=1),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=12,
)


@given(columns)
def test_entering_what_gains_until_nothing_does_ends_at_the_optimum(
    columns: list[tuple[dict[int, int], int]],
) -> None:
    loads = [{node: load / 8 for node, load in column.items()} for column, _ in columns]
    values = [float(value) for _, value in columns]
    packing: Packing[int] = Packing([1.0] * NODES)
    for _ in range(200):
        gains = [packing.gain(load, value) for load, value in zip(loads, values, strict=True)]
        best = int(np.argmax(gains))
        if gains[best] < 1e-6:
            break
        packing.enter(best, loads[best], values[best])
    solution = packing.solution()
    matrix = [[load.get(node, 0.0) for load in loads] for node in range(NODES)]
    optimum = linprog([-value for value in values], A_ub=matrix, b_ub=[1.0] * NODES)
    assert sum(values[i] * amount for i, amount in solution) == pytest.approx(
        -optimum.fun, rel=1e-3
    )
    for row in matrix:
        assert sum(row[i] * amount for i, amount in solution) <= 1 + 1e-9
    assert min(packing.prices) >= -1e-6


@given(
    st.lists(st.integers(0, 5).map(float), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 3)), max_size=30),
)
def test_the_freest_members_of_a_class_are_those_that_a_look_at_all_finds(
    free: list[float], taken: list[tuple[int, int, int]]
) -> None:
    half = len(free) // 2
    members = [list(range(half)), list(range(half, len(free)))]
    freest = Freest(members, free)
    for first, second, most in taken:
        expected: list[int] = []
        for i in (first, second):
            left = (node for node in members[i] if node not in expected)
            expected.append(max(left, key=free.__getitem__))
        path = freest.path(((first, 0, 1), (second, 1, 2)))
        assert [node for node, _, _ in path] == expected
        for node in expected:
            free[node] -= most
