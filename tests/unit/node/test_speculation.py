"""Prompt lookup against a naive scan, and how much is proposed."""

from hypothesis import given
from hypothesis import strategies as st

from services.node.core.speculation import (
    FIRST,
    LEARNT_A_STEP,
    LONGEST_PAUSE,
    SIZES,
    Lookup,
    Speculation,
)

TOKENS = st.lists(st.integers(0, 3), max_size=60)
LOOP = [5, 6, 7, 8] * 3
"""What comes next is always known."""


def speculating(most: int) -> Speculation:
    speculation = Speculation(list(LOOP), most)
    speculation.learn()
    return speculation


def proposed(tokens: list[int], count: int) -> tuple[int, ...]:
    lookup = Lookup(tokens)
    lookup.learn()
    return lookup.propose(count)


def scan(tokens: list[int], count: int) -> tuple[int, ...]:
    """What Lookup.propose gives, by looking at all tokens."""
    for size in SIZES:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                known = list(tokens)
                for at in range(end, end + count):
                    known.append(known[at])
                return tuple(known[len(tokens) :])
    return ()


@given(TOKENS, st.lists(st.tuples(st.integers(0, 9), TOKENS), max_size=6))
def test_a_lookup_finds_what_a_scan_finds(
    tokens: list[int], steps: list[tuple[int, list[int]]]
) -> None:
    """However the tokens grow."""
    lookup = Lookup(tokens)
    for count, more in steps:
        lookup.learn()
        assert lookup.propose(count) == scan(tokens, count)
        tokens += more


def test_the_longest_n_gram_decides_and_of_its_occurrences_the_last() -> None:
    assert proposed([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == (9, 2)
    assert proposed([1, 2, 9, 1, 2, 8, 1, 2], 2) == (8, 1)
    assert proposed([1, 9, 2, 8, 1], 2) == ()


def test_what_reaches_the_end_goes_on_from_its_beginning() -> None:
    assert proposed([4, 4, 4], 5) == (4,) * 5
    assert proposed([0, 1, 2, 0, 1, 2], 7) == (0, 1, 2, 0, 1, 2, 0)


def test_a_long_prompt_is_learnt_in_several_steps() -> None:
    tokens = [1, 2, 3, *range(10, 2 * LEARNT_A_STEP), 1, 2]
    lookup, steps = Lookup(tokens), 0
    while not (found := lookup.propose(2)):
        lookup.learn()
        steps += 1
    assert (steps, found) == (2, (3, 10))


def test_proposals_grow_while_all_is_accepted() -> None:
    speculation = speculating(most=15)
    sizes = []
    for _ in range(5):
        proposed = speculation.propose(99)
        sizes.append(len(proposed))
        speculation.settle(len(proposed), len(proposed))
    assert sizes == [3, 7, 15, 15, 15]


def test_proposals_shrink_to_what_was_accepted() -> None:
    speculation = speculating(most=15)
    speculation.settle(7, 7)
    for accepted, then in ((5, 5), (1, FIRST)):
        speculation.settle(15, accepted)
        assert len(speculation.propose(99)) == then


def test_a_step_without_room_for_all_does_not_shrink_the_next() -> None:
    speculation = speculating(most=15)
    speculation.settle(7, 7)
    assert len(speculation.propose(2)) == 2
    speculation.settle(2, 2)
    assert len(speculation.propose(99)) == 15


def test_a_sequence_pauses_longer_after_each_failure_until_a_success() -> None:
    speculation = speculating(most=15)

    def pause() -> int:
        steps = 0
        while not speculation.propose(1):
            steps += 1
        return steps

    pauses = []
    for _ in range(9):
        speculation.settle(1, 0)
        pauses.append(pause())
    assert pauses == [0, 1, 3, 7, 15, 31, 63, LONGEST_PAUSE, LONGEST_PAUSE]
    speculation.settle(1, 1)
    speculation.settle(1, 0)
    assert pause() == 0


def test_no_more_than_the_most() -> None:
    speculation = speculating(most=2)
    for _ in range(3):
        assert len(speculation.propose(99)) == 2
        speculation.settle(2, 2)
