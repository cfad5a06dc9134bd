"""What becomes of one order of a copy, step by step."""

import pytest

from services.registry.core.orders import ASKED_S, REFUSED_S, STALL_S, Order, Orders, State
from shared.errors import IllegalTransition
from shared.ids import Generation, NodeId
from shared.messages.pool import CopyProgress
from shared.story import Story
from tests.unit.registry.builders import MODEL

ORDER = Order(MODEL, NodeId("a"), Generation(1))


def orders() -> Orders:
    made = Orders("disk", Story())
    made.ask(ORDER, "model_add", 0.0)
    return made


def hear(orders: Orders, now: float, done: int | None = None, error: str = "") -> State | None:
    """The node reports this many bytes, or nothing."""
    progress = None
    if done is not None:
        progress = CopyProgress(
            model_id=MODEL, done=done, nbytes=400, running=not error, error=error
        )
    orders.report(ORDER, progress, now, gone=False, made=False)
    orders.validate()
    return orders.state(ORDER)


def test_a_node_that_says_nothing_is_passed_over_for_a_while() -> None:
    each = orders()
    assert hear(each, ASKED_S - 1) is State.ASKED
    assert hear(each, ASKED_S) is State.REFUSED
    assert each.passed_over(MODEL) == {"a": "it does not answer"}
    assert hear(each, ASKED_S + REFUSED_S - 1) is State.REFUSED
    assert hear(each, ASKED_S + REFUSED_S) is None


def test_a_copy_without_progress_is_doubted_until_it_goes_on() -> None:
    each = orders()
    assert hear(each, 1.0, done=10) is State.RUNNING
    assert each.expected(MODEL) == ["a"]
    assert hear(each, 1.0 + STALL_S, done=10) is State.DOUBTED
    assert not each.expected(MODEL)
    assert each.under_way == {ORDER}, "its node is still busy"
    assert hear(each, 2.0 + STALL_S + REFUSED_S, done=10) is State.DOUBTED, "no progress still"
    assert hear(each, 3.0 + STALL_S + 2 * REFUSED_S, done=20) is State.RUNNING


def test_a_copy_that_its_node_makes_after_all_is_not_counted_on() -> None:
    each = orders()
    each.refuse(ORDER, "the disk is full", 1.0)
    assert hear(each, 2.0, done=10) is State.DOUBTED
    assert each.passed_over(MODEL) == {"a": "the disk is full"}
    assert hear(each, 3.0) is State.REFUSED
    each.refuse(ORDER, "late", 4.0)
    assert each.passed_over(MODEL) == {"a": "the disk is full"}


def test_an_error_of_a_copy_that_runs_is_the_reason() -> None:
    each = orders()
    hear(each, 1.0, done=10)
    assert hear(each, 2.0, done=10, error="a bad block") is State.REFUSED
    assert each.passed_over(MODEL) == {"a": "a bad block"}


def test_a_node_is_not_asked_twice_for_a_copy() -> None:
    each = orders()
    hear(each, 1.0, done=10)
    with pytest.raises(IllegalTransition, match="running -> asked"):
        each.ask(ORDER, "model_add", 2.0)


def test_every_step_of_a_copy_names_what_made_it_needed() -> None:
    story = Story()
    each = Orders("disk", story)
    each.ask(ORDER, "model_add", 0.0)
    for step, done in enumerate((10, None)):
        hear(each, 1.0 + step, done=done)
    hear(each, 5.0, done=10)
    assert [(t.cause, t.text) for t in story.of("a")] == [
        ("model_add", "copy on disk running"),
        ("model_add", "copy on disk is no order any more"),
        ("node_status", "copy on disk running"),
    ], "nobody has asked for the last one"
