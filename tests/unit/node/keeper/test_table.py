"""What a keeper holds is never more than it was given, and places never overlap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.keeper.messages import Drop, Forget, Held, Hold, Space
from services.node.keeper.table import Malformed, Table

NBYTES = 10


def test_a_memory_in_place_of_another_has_nothing_in_it() -> None:
    table = Table()
    assert table.hold(Hold("arena", NBYTES), 7) is None
    table.note(Space("arena", "m", 0, 4, (0,)))
    assert table.hold(Hold("arena", 2 * NBYTES, "new"), 8) == 7
    assert table.spaces == []
    assert table.memories["arena"].held == Held("arena", 2 * NBYTES, "new")
    assert table.drop(Drop("arena")) == 8
    assert table.drop(Drop("arena")) is None


def test_the_last_word_on_a_model_counts() -> None:
    table = Table()
    table.hold(Hold("arena", NBYTES), 7)
    table.note(Space("arena", "m", 0, 4, (0,)))
    table.note(Space("arena", "m", 2, 4, (0, 1), active=True))
    assert table.spaces == [Space("arena", "m", 2, 4, (0, 1), active=True)]
    table.forget(Forget("arena", "m"))
    table.forget(Forget("arena", "m"))
    table.forget(Forget("nowhere", "m"))
    assert table.spaces == []


@pytest.mark.parametrize(
    ("space", "why"),
    [
        (Space("elsewhere", "x", 0, 1), "no memory 'elsewhere'"),
        (Space("arena", "x", 0, NBYTES + 1), "11 bytes at 0 of 'arena', which has 10"),
        (Space("arena", "x", NBYTES, 1), "1 bytes at 10"),
        (Space("arena", "x", 9, 0), "0 bytes at 9"),
        (Space("arena", "x", 5, 2), "places of m and x overlap"),
    ],
)
def test_places_that_do_not_fit_change_nothing(space: Space, why: str) -> None:
    table = Table()
    table.hold(Hold("arena", NBYTES), 7)
    there = Space("arena", "m", 4, 3)
    table.note(there)
    with pytest.raises(Malformed, match=why):
        table.note(space)
    assert table.spaces == [there]


NAMES = st.sampled_from(["arena", "host cache", "other"])
MODELS = st.sampled_from(["a", "b", "c"])
COUNTS = st.integers(0, 12)


@given(
    st.lists(
        st.one_of(
            st.builds(Hold, NAMES, COUNTS),
            st.builds(Drop, NAMES),
            st.builds(Space, NAMES, MODELS, COUNTS, COUNTS, st.tuples(COUNTS)),
            st.builds(Forget, NAMES, MODELS),
        ),
        max_size=40,
    )
)
def test_places_lie_apart_and_every_descriptor_is_closed_once(
    messages: list[Hold | Drop | Space | Forget],
) -> None:
    table, opened, closed = Table(), list[int](), list[int]()
    for number, message in enumerate(messages):
        freed = None
        match message:
            case Hold():
                opened.append(number)
                freed = table.hold(message, number)
            case Drop():
                freed = table.drop(message)
            case Space():
                try:
                    table.note(message)
                except Malformed:
                    assert message not in table.spaces or message in messages[:number]
            case Forget():
                table.forget(message)
        if freed is not None:
            closed.append(freed)
        table.validate()
    held = [memory.descriptor for memory in table.memories.values()]
    assert sorted(opened) == sorted([*closed, *held])
