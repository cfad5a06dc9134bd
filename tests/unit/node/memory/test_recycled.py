"""Memory that is handed out again, once nobody sees it any more."""

import gc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.node.memory.arena import PAGE
from services.node.memory.recycled import Recycled
from services.node.memory.views import address


def test_what_was_given_back_is_handed_out_again() -> None:
    recycled = Recycled()
    first = recycled.take(3 * PAGE)
    first.memory[:] = b"x" * len(first.memory)
    view = np.frombuffer(first.memory, np.uint8)[5:7]
    at = address(first.memory)
    del first
    other = recycled.take(3 * PAGE)
    assert address(other.memory) != at  # somebody sees it
    assert view.tolist() == [ord("x")] * 2
    del view
    assert address(recycled.take(3 * PAGE).memory) == at
    assert address(recycled.take(2 * PAGE).memory) == at


def test_memory_that_is_too_small_or_far_too_large_is_not_handed_out() -> None:
    recycled = Recycled()
    at = address(recycled.take(4 * PAGE).memory)
    kept = [recycled.take(size * PAGE) for size in (5, 1)]
    assert at not in [address(lease.memory) for lease in kept]
    assert address(recycled.take(4 * PAGE).memory) == at


def test_no_more_is_kept_than_was_said() -> None:
    recycled = Recycled(kept=1)
    leases = [recycled.take(PAGE) for _ in range(3)]
    last = address(leases[-1].memory)
    for _ in range(3):
        del leases[0]
    gc.collect()
    again = [recycled.take(PAGE) for _ in range(3)]
    assert address(again[0].memory) == last
    assert len(recycled._free) == 0


def test_it_is_found_and_settled_without_a_change_to_the_rest() -> None:
    lease = Recycled().take(5 * PAGE)
    lease.memory[:] = b"x" * len(lease.memory)
    lease.find(2 * PAGE)
    assert bytes(lease.memory[2 * PAGE :]) == b"x" * 3 * PAGE
    lease.settle(2 * PAGE)
    assert bytes(lease.memory[2 * PAGE :]) == b"x" * 3 * PAGE


@given(st.lists(st.tuples(st.integers(1, 6 * PAGE), st.integers(0, 3)), max_size=30))
def test_nobody_is_handed_what_another_sees(acts: list[tuple[int, int]]) -> None:
    """An act is the size of a piece of memory, and how many later pieces come while it is used."""
    recycled, held = Recycled(), list[tuple[int, memoryview, bytes]]()
    for number, (nbytes, stays) in enumerate(acts):
        memory = recycled.take(nbytes).memory
        assert len(memory) == nbytes
        content = bytes([number % 251]) * nbytes
        memory[:] = content
        held.append((number + stays, memory, content))
        held = [each for each in held if each[0] > number]
        assert all(memory == content for _, memory, content in held)
