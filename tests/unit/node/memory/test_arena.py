import gc
import mmap
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.node.memory.arena import LARGE, PAGE, Arena, ModelSpace, Span
from services.node.memory.views import address
from shared.errors import BadInput, CapacityExceeded, Conflict
from shared.layout import ALIGN, BlockSpec, Manifest
from tests.support.amounts import examples

PAGES = 32


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12 * PAGE)), max_size=60), st.integers())
def test_spans_never_overlap_and_nothing_leaks(steps: list[tuple[bool, int]], seed: int) -> None:
    arena = Arena(PAGES * PAGE)
    draw = random.Random(seed)
    spans: dict[Span, int] = {}
    for index, (allocate, nbytes) in enumerate(steps):
        if allocate:
            try:
                span = arena.allocate(nbytes)
            except CapacityExceeded:
                continue
            assert span.nbytes == nbytes
            assert span.offset % PAGE == 0
            span.memory[:] = bytes([index % 256]) * nbytes
            spans[span] = index % 256
        elif spans:
            span = draw.choice(list(spans))
            arena.free(span)
            del spans[span]
        for span, mark in spans.items():
            assert span.memory[0] == mark
            assert span.memory[-1] == mark
        used = sum(-(-span.nbytes // PAGE) * PAGE for span in spans)
        assert arena.free_bytes == arena.nbytes - used
    for span in spans:
        arena.free(span)
    assert arena.allocate(arena.nbytes).nbytes == PAGES * PAGE


def test_first_fit() -> None:
    arena = Arena(10 * PAGE)
    first, second, third = (arena.allocate(2 * PAGE) for _ in range(3))
    arena.free(first)
    assert arena.allocate(3 * PAGE).offset == 6 * PAGE
    assert arena.allocate(1).offset == 0
    arena.free(third)
    arena.free(second)
    assert arena.allocate(5 * PAGE).offset == PAGE


def test_what_does_not_fit_says_how_much_is_free() -> None:
    arena = Arena(4 * PAGE)
    spans = [arena.allocate(PAGE) for _ in range(4)]
    arena.free(spans[0])
    arena.free(spans[2])
    with pytest.raises(CapacityExceeded, match=f"{2 * PAGE} of .* are free, {PAGE} in one piece"):
        arena.allocate(PAGE + 1)
    with pytest.raises(BadInput):
        arena.allocate(0)


def test_a_span_is_freed_once_and_only_when_nobody_holds_it() -> None:
    arena = Arena(PAGE)
    span = arena.allocate(10)
    span.hold("transport")
    span.hold("engine")
    span.release("transport")
    with pytest.raises(Conflict, match="still held by engine"):
        arena.free(span)
    with pytest.raises(Conflict, match="does not hold"):
        span.release("transport")
    span.release("engine")
    arena.free(span)
    with pytest.raises(Conflict, match="freed twice"):
        arena.free(span)
    with pytest.raises(Conflict):
        Arena(PAGE).free(arena.allocate(10))


def test_a_closed_arena_hands_nothing_out_but_its_views_stay() -> None:
    arena = Arena(PAGE)
    span = arena.allocate(10)
    descriptor = arena.memory.descriptor
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    gc.collect()
    span.memory[:] = b"0123456789"
    with pytest.raises(CapacityExceeded):
        arena.allocate(1)


def test_who_has_the_descriptor_can_read_and_no_more() -> None:
    arena = Arena(PAGE)
    descriptor = arena.memory.descriptor
    with mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ) as seen:
        arena.allocate(4).memory[:] = b"here"
        assert seen[:4] == b"here"
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    for file in (descriptor, arena.file):
        with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
            os.ftruncate(file, 0)


def test_an_arena_that_was_kept_has_its_bytes_and_places_again() -> None:
    before = Arena(8 * PAGE)
    before.allocate(PAGE)
    span = before.allocate(2 * PAGE + 5)
    span.memory[:] = bytes(range(256)) * 32 + b"12345"
    kept = os.dup(before.file)
    before.close()
    after = Arena(8 * PAGE, kept=kept)
    os.close(kept)
    again = after.take(span.offset, span.nbytes)
    assert again.memory == bytes(range(256)) * 32 + b"12345"
    assert after.free_bytes == 5 * PAGE
    taken = (PAGE, 1), (0, PAGE + 1), (3 * PAGE, PAGE)
    nowhere = (5, 1), (8 * PAGE, 1), (-PAGE, PAGE), (0, 0)
    for offset, nbytes in (*taken, *nowhere):
        with pytest.raises(Conflict):
            after.take(offset, nbytes)
    assert after.take(4 * PAGE, 4 * PAGE).taken == 4 * PAGE
    after.free(again)
    assert after.allocate(4 * PAGE).offset == 0


def test_what_is_no_kept_arena_is_refused() -> None:
    arena = Arena(2 * PAGE)
    with pytest.raises(BadInput, match="has 8192 bytes, the arena 4096"):
        Arena(PAGE, kept=arena.file)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(BadInput, match="sealed in another way"):
        Arena(PAGE, kept=unsealed)
    os.close(unsealed)


def test_no_memory_for_the_arena() -> None:
    with pytest.raises(CapacityExceeded, match="arena_bytes"):
        Arena(1 << 60)


def manifest(*sizes: int) -> Manifest:
    blocks = tuple(BlockSpec(i, i, i, size, (), ()) for i, size in enumerate(sizes))
    return Manifest(architecture="x", config={}, chunk_bytes=1024, blocks=blocks)


def test_blocks_of_a_model_lie_apart_and_aligned() -> None:
    arena = Arena(4 * PAGE)
    shape = manifest(1000, ALIGN, 1)
    span = arena.allocate(ModelSpace.size(shape))
    space = ModelSpace(shape, span)
    for index, size in enumerate((1000, ALIGN, 1)):
        block = space.block(index)
        assert (len(block), block.readonly, block.contiguous) == (size, False, True)
        block[:] = bytes([index + 1]) * size
    for index in range(3):
        assert set(space.block(index)) == {index + 1}
    assert span.memory[1024] == 2
    with pytest.raises(BadInput, match="span of 10 bytes"):
        ModelSpace(shape, arena.allocate(10))


def test_large_blocks_of_a_model_begin_at_a_page() -> None:
    """So that a disk can write right into them; small ones would lose too much."""
    shape = manifest(100, LARGE, LARGE - 2 * ALIGN, 10, LARGE + 1)
    nbytes = ModelSpace.size(shape)
    assert nbytes < shape.nbytes + 2 * PAGE + 5 * ALIGN
    space = ModelSpace(shape, Arena(nbytes + PAGE).allocate(nbytes))
    starts = [address(space.block(index)) for index in range(5)]
    assert [start % PAGE == 0 for start in starts] == [True, True, True, False, True]
    assert all(start % ALIGN == 0 for start in starts)
    for index, spec in enumerate(shape.blocks):
        assert space.block(index).nbytes == spec.nbytes
        assert index == 0 or starts[index] >= starts[index - 1] + shape.blocks[index - 1].nbytes
    assert starts[-1] + LARGE + 1 <= address(space.span.memory) + nbytes
