"""Cutting a model into blocks and laying them out: optimal, complete, aligned."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.node.checkpoints.packing import (
    ITEMSIZE,
    MAX_CHUNK,
    MIN_CHUNK,
    UnitTensor,
    chunk_bytes,
    default_blocks,
    lay_out,
    partition,
)
from shared.layout import ALIGN

Cut = tuple[tuple[int, int], ...]

tensors = st.builds(
    lambda dtype, shape: (dtype, tuple(shape)),
    st.sampled_from(sorted(ITEMSIZE)),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
)
units = st.lists(st.lists(tensors, min_size=1, max_size=4), min_size=1, max_size=8)


def every_cut(n: int, blocks: int) -> list[Cut]:
    cuts = []
    for inner in combinations(range(1, n), blocks - 1):
        edges = [0, *inner, n]
        cuts.append(tuple((start, stop - 1) for start, stop in pairwise(edges)))
    return cuts


def cost(sizes: list[int], cut: Cut) -> tuple[int, int]:
    runs = [sum(sizes[first : last + 1]) for first, last in cut]
    return max(runs), sum(run * run for run in runs)


@given(st.data(), st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_partition_is_the_best_of_all_cuts(data: st.DataObject, sizes: list[int]) -> None:
    blocks = data.draw(st.integers(1, len(sizes)))
    found = partition(sizes, blocks)
    candidates = every_cut(len(sizes), blocks)
    assert found in candidates
    assert cost(sizes, found) == min(cost(sizes, cut) for cut in candidates)


@given(st.data(), units)
def test_layout_places_every_tensor_once_aligned_and_in_order(
    data: st.DataObject, raw: list[list[tuple[str, tuple[int, ...]]]]
) -> None:
    given_units = [
        [UnitTensor(f"u{u}.t{t}", dtype, shape) for t, (dtype, shape) in enumerate(unit)]
        for u, unit in enumerate(raw)
    ]
    blocks = lay_out(given_units, data.draw(st.integers(0, len(raw))))
    placed = [tensor for block in blocks for tensor in block.tensors]
    wanted = [tensor for unit in given_units for tensor in unit]
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in placed] == [
        (t.name, t.dtype, t.shape, t.nbytes) for t in wanted
    ]
    units_held = [u for block in blocks for u in range(block.first_unit, block.last_unit + 1)]
    assert units_held == list(range(len(raw)))
    for index, block in enumerate(blocks):
        assert block.index == index
        end = 0
        for tensor in block.tensors:
            assert tensor.offset % ALIGN == 0
            assert 0 <= tensor.offset - end < ALIGN
            end = tensor.offset + tensor.nbytes
        assert block.nbytes % ALIGN == 0
        assert 0 <= block.nbytes - end < ALIGN


@given(st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_chunks_grow_with_the_model_within_limits(a: int, b: int) -> None:
    small, large = chunk_bytes(min(a, b)), chunk_bytes(max(a, b))
    assert MIN_CHUNK <= small <= large <= MAX_CHUNK
    assert large.bit_count() == 1
    assert large == MAX_CHUNK or large * 4096 >= max(a, b)


@given(st.integers(1, 200))
def test_default_is_a_block_a_unit_up_to_sixteen(n: int) -> None:
    assert default_blocks(n) == min(n, 16)
