"""Stories: what happened to a subject, in order, and no more than fits."""

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
