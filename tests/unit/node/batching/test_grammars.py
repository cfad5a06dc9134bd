"""Sequences that wait for their grammars, at the leader and at the stages that draw."""

from services.node.core.microbatches import (
    Emit,
    Failed,
    Failure,
    Free,
    Path,
    Prepare,
    Release,
    Send,
)
from services.node.core.rows import Context, Draw, Row
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Cancel, LogitRules, Sampling, Submit
from tests.support.submits import BLOCKS, MODEL, TWO, WHOLE, stages, submit
from tests.unit.node.batching.builders import (
    FROM_C,
    FULL,
    FakeKv,
    Named,
    batcher,
    come,
    forward,
    one,
    queue,
    rows,
    run,
    take,
)

RULED = LogitRules(grammar="g")


def ruled(name: str, path: tuple[Stage, ...] = WHOLE) -> Submit:
    return submit(name, path, prompt=(3, 1), rules=RULED)


def test_an_attempt_waits_for_its_grammar_and_lets_others_go_first() -> None:
    core = batcher()
    (asked,) = core.submit(ruled("g"), n_blocks=BLOCKS, held=range(BLOCKS))
    assert asked == Prepare(MODEL, "g#1", Context((3, 1), 2, (), RULED))
    queue(core, one("p", WHOLE))
    assert core.waiting == 2
    work = take(core)
    assert rows(work) == [("p#1", 0, 1)]
    assert core.prepared("g#1") == []
    run(core, work)
    assert {row[0] for row in rows(take(core))} == {"g#1", "p#1"}
    assert core.waiting == 0


def test_an_attempt_whose_grammar_cannot_be_made_fails_alone() -> None:
    core = batcher()
    queue(core, ruled("g"), one("p", WHOLE))
    released, told = core.prepared("g#1", Failure("bad_input", "no"))
    assert released == Release(("g#1",))
    assert isinstance(told, Emit)
    assert isinstance(told.what, AttemptFailed)
    assert (told.what.request, told.what.code, told.what.message) == ("g", "bad_input", "no")
    assert rows(take(core)) == [("p#1", 0, 1)]


def test_an_attempt_may_be_asked_about_and_cancelled_while_its_grammar_is_made() -> None:
    core = batcher()
    message = ruled("g")
    queue(core, message)
    assert core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS)) == []
    assert core.cancel(Cancel(request=message.request, attempt=1)) == [Release(("g#1",))]
    assert (core.running, core.waiting) == (0, 0)


def test_what_was_made_for_an_attempt_that_did_not_begin_is_given_back() -> None:
    core = batcher()
    queue(core, ruled("g"))
    core.prepared("g#1")
    cancel = Cancel(request=ruled("g").request, attempt=1)
    assert core.cancel(cancel) == [Release(("g#1",))]


def test_a_preempted_attempt_has_its_grammar_made_anew_and_goes_first() -> None:
    kv = FakeKv(kv_capacity=40)
    core = batcher(kv=kv)
    queue(core, one("p", WHOLE), ruled("g"))
    core.prepared("g#1")
    run(core, take(core))
    (part,) = take(core)
    kv.kv_used = 32
    queue(core, one("late", WHOLE))
    released, asked = core.no_room(part, FULL)
    kv.kv_used = 16
    assert released == Release(("g#1",))
    assert asked == Prepare(MODEL, "g#1~1", Context((3, 1, 1), 2, (), RULED))
    core.prepared("g#1~1")
    run(core, (core.live(part),))
    assert {row[0] for row in rows(take(core))} == {"p#1", "g#1~1"}
    assert core.waiting == 1


def test_a_grammar_that_another_node_follows_is_not_made_by_the_leader() -> None:
    core = batcher()
    queue(core, ruled("g", TWO))
    assert rows(take(core)) == [("g#1", 0, 2)]


def test_a_row_waits_for_its_grammar_and_others_of_its_batch_do_not() -> None:
    core = batcher()
    draws = [
        Draw(0, Sampling(), Context((1,), 1, (), rules))
        for rules in (RULED, LogitRules(min_tokens=1))
    ]
    given = [Row(f"{name}#1", 0, 1, 9, draw=draw) for name, draw in zip("gp", draws, strict=True)]
    (asked,) = come(core, forward(FROM_C, *given), Named("hidden"))
    assert isinstance(asked, Prepare)
    assert (asked.model_id, asked.sequence, asked.context) == (MODEL, "g#1", draws[0].context)
    assert rows(take(core)) == [("p#1", 0, 1)]
    assert core.take() == ()
    assert core.prepared("g#1") == []
    (part,) = take(core)
    assert (part.keys, part.batch, part.offsets) == (("g#1",), 1, (0,))


def test_a_stage_before_the_last_makes_no_grammar() -> None:
    core = batcher()
    path = Path(MODEL, stages(("c", 0, 2), ("a", 2, 4), ("b", 4, BLOCKS)))
    draw = Draw(0, Sampling(), Context((1,), 1, (), RULED))
    assert come(core, forward(path, Row("g#1", 0, 1, 9, draw=draw))) == []
    assert rows(take(core)) == [("g#1", 0, 1)]


def test_a_followed_grammar_that_cannot_be_made_fails_at_its_leader() -> None:
    core = batcher()
    draw = Draw(0, Sampling(), Context((1,), 1, (), RULED))
    come(core, forward(FROM_C, Row("g#1", 0, 1, 9, draw=draw), Row("p#1", 0, 1, 9)))
    assert core.prepared("g#1", Failure("bad_input", "no")) == [
        Release(("g#1",)),
        Send(FROM_C.leader, Failed(("g#1",), "bad_input", "no")),
    ]
    assert rows(take(core)) == [("p#1", 0, 1)]


def test_a_followed_sequence_that_ends_needs_its_grammar_no_more() -> None:
    core = batcher()
    draw = Draw(0, Sampling(), Context((1,), 1, (), RULED))
    come(core, forward(FROM_C, Row("g#1", 0, 1, 9, draw=draw)))
    assert core.running == 1
    assert core.received(Free(("g#1",))) == [Release(("g#1",))]
    assert core.running == 0
