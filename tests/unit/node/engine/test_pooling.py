"""Sums of states, by sequence."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.node.engine.base import Row
from services.node.engine.pooling import Sums
from shared.errors import Conflict
from shared.messages.serving import Pooling
from tests.unit.node.engine.models import MODEL, make_model, part, row, run

LENGTH, WIDTH = 40, 5


def chunk(start: int, stop: int, key: str = "s") -> Row:
    return Row(key, start, stop - start, LENGTH, pooling=Pooling.MEAN)


@given(cuts=st.sets(st.integers(1, LENGTH - 1)), seed=st.integers(0, 1 << 20))
def test_a_sum_has_the_same_bits_however_it_is_cut(cuts: set[int], seed: int) -> None:
    """Those of one addition after the other."""
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-9, 9, (LENGTH, 1))
    states = torch.from_numpy((random.normal(size=(LENGTH, WIDTH)) * scale).astype(np.float32))
    expected = torch.zeros(WIDTH, dtype=torch.float64)
    for state in states:
        expected += state.double()
    sums = Sums()
    bounds = [0, *sorted(cuts), LENGTH]
    for start, stop in pairwise(bounds):
        found = sums.add(chunk(start, stop), states[start:stop])
    assert found.numpy().tobytes() == expected.numpy().tobytes()


def test_a_sum_goes_on_only_where_it_began() -> None:
    sums = Sums()
    sums.add(chunk(0, 4), torch.ones(4, WIDTH))
    with pytest.raises(Conflict):
        sums.add(chunk(4, 8, "other"), torch.ones(4, WIDTH))
    sums.free(["s", "unknown"])
    with pytest.raises(Conflict):
        sums.add(chunk(4, 8), torch.ones(4, WIDTH))


def test_an_engine_forgets_the_sums_of_sequences_that_end() -> None:
    model = make_model(dtype="float32")
    engine = model.engine()
    first = row("s", 0, [3, 1, 4], limit=5)
    mean = Row("s", 0, 3, 5, first.tokens, pooling=Pooling.MEAN)
    assert run(engine, part([mean], 0, model.n_blocks)).vectors == {}
    engine.free(("s",))
    assert not engine._models[MODEL].sums._of


def test_states_that_are_not_finite_end_their_request() -> None:
    model = make_model(dtype="float32")
    engine = model.engine()
    (norm,) = (unit.norm for unit in engine._models[MODEL].blocks[model.n_blocks - 1][-1:])
    norm[0] = float("nan")
    last = Row("s", 0, 2, 2, (3, 1), pooling=Pooling.LAST)
    result = run(engine, part([last], 0, model.n_blocks))
    assert result.vectors == {}
    assert "not finite" in str(result.failed["s"])
