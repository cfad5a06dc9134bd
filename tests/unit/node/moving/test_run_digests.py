"""Runs of chunks, and digests of chunks that come in parts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.node.core.pulling import runs_of
from services.node.moving.run_digests import RunDigests
from tests.unit.node.moving.movers import CHUNK, CONTENT, MANIFEST


@given(
    chunks=st.lists(st.integers(0, 30), unique=True).map(sorted),
    most=st.integers(1, 6),
)
def test_runs_are_the_chunks_in_order(chunks: list[int], most: int) -> None:
    runs = list(runs_of(chunks, most))
    assert [chunk for run in runs for chunk in run] == chunks
    assert all(1 <= len(run) <= most for run in runs)
    # No two neighbours could be one.
    for one, other in pairwise(runs):
        assert one.stop < other.start or len(one) == most


@given(cuts=st.lists(st.integers(1, 200_000), max_size=8), wrong=st.sets(st.integers(0, 3)))
def test_digests_of_parts_cut_anywhere(cuts: list[int], wrong: set[int]) -> None:
    data = bytearray(CONTENT[1])
    for chunk in wrong:
        data[chunk * CHUNK] ^= 1
    right: list[int] = []
    check = RunDigests(MANIFEST, 1, range(4), right.extend)
    left = memoryview(data)
    for cut in cuts:
        check(left[:cut])
        left = left[cut:]
    check(left)
    assert check.wrong == sorted(wrong)
    assert right == [chunk for chunk in range(4) if chunk not in wrong]


def test_a_transport_may_tell_of_several_chunks() -> None:
    """A transport may tell of several at once."""
    right: list[range] = []
    check = RunDigests(MANIFEST, 1, range(1, 4), right.append)
    check.found(1, right=False)
    check.found(2, right=True)
    assert (check.whole, check.wrong, right) == (3, [1], [range(2, 4)])
