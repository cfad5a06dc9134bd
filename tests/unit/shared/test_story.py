"""Stories: what happened to a subject, in order, and no more than fits."""

import enum

import pytest

from shared.errors import IllegalTransition
from shared.story import Story


def test_a_subject_is_told_what_concerns_it_and_what_it_caused() -> None:
    story = Story()
    story.tell(1.0, "join-1", "joined", "node-1")
    story.tell(2.0, "ev-1", "reserved", "node-1", "demo")
    story.tell(3.0, "ev-1", "planned", "demo")
    story.tell(4.0, "ev-2", "planned", "other")
    assert [t.text for t in story.of("node-1")] == ["joined", "reserved"]
    assert [t.text for t in story.of("ev-1")] == ["reserved", "planned"]
    assert [t.at for t in story.of("demo", most=1)] == [3.0]
    assert story.of("nobody") == ()


def test_the_oldest_transitions_are_forgotten() -> None:
    story = Story(limit=3)
    for number in range(5):
        story.tell(float(number), "cause", f"step {number}", "node-1")
    assert [t.text for t in story.of("node-1")] == ["step 2", "step 3", "step 4"]


def test_an_illegal_step_carries_the_story() -> None:
    story = Story()
    story.tell(1.0, "ev-1", "standby -> active", "demo")
    error = story.illegal("demo", "active -> active")
    assert isinstance(error, IllegalTransition)
    assert str(error) == "demo: active -> active is not a step; so far: standby -> active (ev-1)"


class Mode(enum.Enum):
    ACTIVE = "active"
    STANDBY = "standby"


TABLE: dict[Mode | None, frozenset[Mode | None]] = {
    None: frozenset({Mode.STANDBY}),
    Mode.STANDBY: frozenset({Mode.ACTIVE, None}),
    Mode.ACTIVE: frozenset({Mode.STANDBY}),
}


@pytest.mark.parametrize("before", TABLE)
@pytest.mark.parametrize("after", TABLE)
def test_a_step_is_legal_if_the_table_has_it(before: Mode | None, after: Mode | None) -> None:
    story = Story()
    if after in TABLE[before]:
        story.check_step("demo", TABLE, before, after)
        return
    names = [state.value if state else "nothing" for state in (before, after)]
    with pytest.raises(IllegalTransition, match=f"^demo: {names[0]} -> {names[1]} is not a step"):
        story.check_step("demo", TABLE, before, after)
