"""Draws by the GPU's kernel beside the host's. Where it runs: see test_paged_attention.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here: its kernels are not tested")

from services.node.engine import device_sampling
from services.node.engine.base import Draw
from services.node.engine.sampling import sample, uniform
from shared.messages.serving import Sampling
from tests.support.amounts import examples
from tests.unit.node.engine.test_sampling import CUTS, LOGITS

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")


@given(
    rows=st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([1e-3, 0.3, 1.0, 4.0]),
            top_k=st.integers(-1, 30),
            top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
            min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
        ),
        min_size=1,
        max_size=3,
    ),
    levels=st.sampled_from([2, 5, 1000]),
    vocab=st.sampled_from([5, 25, 70]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200 if GPU else examples(6))
def test_what_the_host_draws(rows: list[Sampling], levels: int, vocab: int, seed: int) -> None:
    """`levels`: of logits; few: many of them are equal. Some are negative. A row in between is not
    drawn from."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (len(rows) + 1, vocab), generator=generator)
    logits = logits * (4.0 / levels)
    logits[:, 3] = -torch.inf
    numbers = [0, *range(2, len(rows) + 1)]
    chances = [uniform(0, index) for index in range(len(rows))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_sampling, "TILE", 32)
        got = device_sampling.draw(logits.to(DEVICE), numbers, rows, chances)
    draws = [Draw(index, row) for index, row in enumerate(rows)]
    assert got.tolist() == [drawn.token for drawn in sample(logits[numbers], draws)]


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_no_token_without_weight(chance: float) -> None:
    """Also where rounding has the number reach the total."""
    logits = torch.tensor([[-torch.inf, 1.0, 0.5, -torch.inf]])
    for row in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2, top_p=0.99)):
        found = device_sampling.draw(logits.to(DEVICE), [0], [row], [chance])
        assert found.tolist() == [1 if chance == 0 else 2]


@pytest.mark.parametrize(("sampling", "allowed"), CUTS)
def test_cuts(sampling: Sampling, allowed: set[int]) -> None:
    """The least numbers with which every token that may be drawn is drawn, and the largest."""
    weights = LOGITS.exp()[sorted(allowed)].double()
    ends = (weights.cumsum(0) / weights.sum()).tolist()
    chances = [0.0, *(end + 1e-3 for end in ends[:-1]), 1.0]
    draws = len(chances)
    found = device_sampling.draw(LOGITS[None].to(DEVICE), [0] * draws, [sampling] * draws, chances)
    assert found.tolist() == [*sorted(allowed), max(allowed)]
