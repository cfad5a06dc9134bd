"""The scheduler as the leader of attempts, by example; its invariants are in
tests/property/test_batching.py."""

import pytest

from services.node.core.microbatches import Emit, Forward, Free, Release, Sampled, Send
from services.node.core.rows import Context
from services.node.core.sequences import ENOUGH, sequence_key
from shared.errors import StaleEpoch, TransportTimeout
from shared.messages.serving import AttemptFailed, Cancel, LogitRules
from tests.support.submits import MODEL, THREE, TWO, WHOLE, submit
from tests.unit.node.batching.builders import (
    FakeKv,
    _cancel_of,
    ask,
    batcher,
    one,
    queue,
    rows,
    run,
    take,
)


def test_an_attempt_that_comes_again_asks_whether_it_goes_on() -> None:
    """It does while it waits, and while it comes on; not in the same micro-batch for ever."""
    core = batcher()
    first, second = one("r", TWO, size=16), one("s", WHOLE)
    for _ in range(3):
        queue(core, first, second)
    assert (core.running, core.waiting) == (1, 1)
    core.cancel(Cancel(request=second.request, attempt=1))
    for _ in range(2):
        work = take(core)
        queue(core, first)
        core.received(Sampled(work[0].batch, (("r#1", ()),)))
    queue(core, first)
    run(core, take(core))
    queue(core, first)
    with pytest.raises(TransportTimeout, match="r is stuck on its path over a, b"):
        queue(core, first)
    core.cancel(Cancel(request=first.request, attempt=1))
    with pytest.raises(StaleEpoch):
        queue(core, first)


def test_an_attempt_that_this_node_runs_alone_goes_on_as_long_as_the_node_says_so() -> None:
    core = batcher()
    queue(core, one("r", WHOLE))
    take(core)
    queue(core, one("r", WHOLE), one("r", WHOLE))


def test_rules_go_with_the_draw_that_ends_a_prefill_alone() -> None:
    core = batcher(step_tokens=4)
    rules = LogitRules(presence_penalty=1.0)
    message = submit("r", WHOLE, prompt=tuple(range(5)), so_far=(9,), stop_ids=(3,), rules=rules)
    queue(core, message)
    contexts = []
    for token in (7, 7, 8):
        work = take(core)
        contexts.append([row.draw.context if row.draw else "none" for row in work[0].rows])
        run(core, work, token)
    context = Context((0, 1, 2, 3, 4, 9), 5, (3,), rules)
    assert contexts == [["none"], [context], [None]]


def test_a_long_prompt_is_run_in_chunks_beside_decodes() -> None:
    core = batcher(step_tokens=4)
    queue(core, one("short", WHOLE, 2))
    run(core, take(core))
    queue(core, one("long", WHOLE, 9), one("next", WHOLE, 3))
    steps = []
    for _ in range(4):
        work = take(core)
        steps.append(rows(work))
        run(core, work)
    assert steps == [
        [("short#1", 2, 1), ("long#1", 0, 4)],
        [("long#1", 4, 4), ("short#1", 3, 1)],
        [("long#1", 8, 1), ("next#1", 0, 3), ("short#1", 4, 1)],
        [("short#1", 5, 1), ("long#1", 9, 1), ("next#1", 3, 1)],
    ]


def test_a_prompt_that_waits_for_another_holds_up_no_other_path() -> None:
    core = batcher(step_tokens=4)
    queue(core, one("decode", TWO), one("long", WHOLE, 40), one("next", WHOLE, 40))
    steps = []
    for _ in range(4):
        work = take(core)
        steps.append(rows(work))
        for command in run(core, work):
            if isinstance(command, Send) and isinstance(command.message, Forward):
                core.received(Sampled(command.message.batch, (("decode#1", (1,)),)))
    assert steps == [
        [("decode#1", 0, 1), ("long#1", 0, 3)],
        [("long#1", 3, 4), ("decode#1", 1, 1)],
        [("long#1", 7, 4), ("decode#1", 2, 1)],
        [("long#1", 11, 4), ("decode#1", 3, 1)],
    ]


def test_prompts_of_two_paths_take_turns() -> None:
    core = batcher(step_tokens=4)
    whole = [one(name, WHOLE, 40) for name in ("w1", "w2")]
    queue(core, *whole, one("two", TWO, 40), one("decode", TWO))
    chunks = []
    for _ in range(6):
        work = take(core)
        chunks.append([key for key, _, count in rows(work) if count > 1])
        for command in run(core, work):
            if isinstance(command, Send) and isinstance(command.message, Forward):
                back = tuple((row.sequence, (1,)) for row in command.message.rows)
                core.received(Sampled(command.message.batch, back))
    assert chunks == [["two#1"], ["w1#1"]] * 3


def test_only_the_row_that_completes_the_known_tokens_draws() -> None:
    core = batcher(step_tokens=4)
    queue(core, submit("r", WHOLE, prompt=(5, 6, 7), so_far=(8, 9)))
    (first,) = take(core)
    assert [(row.tokens, row.draw) for row in first.rows] == [((5, 6, 7, 8), None)]
    run(core, (first,))
    (second,) = take(core)[0].rows
    assert second.tokens == (9,)
    assert second.draw is not None
    assert second.draw.index == 2


def test_a_path_of_two_stages_has_two_even_micro_batches_in_flight() -> None:
    core = batcher(step_tokens=100)
    queue(core, *(one(f"r{i}", TWO) for i in range(5)))
    (first,), (second,) = take(core), take(core)
    assert [len(first.rows), len(second.rows)] == [3, 2]
    run(core, (first, second))
    assert not core.take()
    core.received(Sampled(first.batch, tuple((k, (1,)) for k in first.keys)))
    assert {row[0] for row in rows(take(core))} == set(first.keys)
    assert not core.take()


def test_stages_that_the_same_devices_run_have_one_micro_batch_in_all() -> None:
    core = batcher(step_tokens=100)
    core.open(MODEL, together=True)
    queue(core, *(one(f"r{i}", TWO) for i in range(5)))
    (only,) = take(core)
    assert len(only.rows) == 5
    run(core, (only,))
    assert not core.take()
    core.received(Sampled(only.batch, tuple((k, (1,)) for k in only.keys)))
    assert len(rows(take(core))) == 5


def test_a_sequence_that_joins_fills_a_micro_batch_that_is_free_but_no_further_one() -> None:
    core = batcher(step_tokens=100)
    for name in ("x", "y"):
        queue(core, one(name, TWO))
        assert rows(take(core)) == [(f"{name}#1", 0, 1)]
    queue(core, one("z", TWO))
    assert not core.take()


def test_an_answer_to_another_micro_batch_is_ignored() -> None:
    core = batcher()
    queue(core, one("r", TWO))
    work = take(core)
    run(core, work)
    batch = work[0].batch
    assert core.received(Sampled(batch + 1, (("r#1", (5,)),))) == []
    (out,) = core.received(Sampled(batch, (("r#1", (5,)),)))
    assert isinstance(out, Emit)
    assert core.received(Sampled(batch, (("r#1", (5,)),))) == []


def test_a_missing_token_fails_the_attempt() -> None:
    core = batcher()
    queue(core, one("r", TWO))
    work = take(core)
    run(core, work)
    commands = core.received(Sampled(work[0].batch, (("r#1", ()),)))
    assert [
        c.what.code for c in commands if isinstance(c, Emit) and isinstance(c.what, AttemptFailed)
    ] == ["protocol"]
    assert core.running == 0


def test_the_end_of_a_sequence_frees_it_at_every_stage_that_may_know_it() -> None:
    core = batcher()
    started, asks, waiting = one("started", THREE), one("asks", THREE), one("waiting", WHOLE)
    queue(core, started, waiting)
    assert core.cancel(_cancel_of(waiting)) == []
    ask(core, asks)
    assert core.cancel(_cancel_of(asks)) == [
        Send("mem://b", Free(("asks#1",))),
        Send("mem://c", Free(("asks#1",))),
    ]
    take(core)
    assert core.cancel(_cancel_of(started)) == [
        Release(("started#1",)),
        Send("mem://b", Free(("started#1",))),
        Send("mem://c", Free(("started#1",))),
    ]
    assert core.cancel(_cancel_of(started)) == []


def test_keys_name_an_attempt() -> None:
    message = submit("r", WHOLE, attempt=3)
    assert sequence_key(message.request, message.attempt) == "r#3"


def test_a_long_prompt_is_not_held_up_by_the_next() -> None:
    core = batcher(step_tokens=4 * ENOUGH, kv=FakeKv(kv_capacity=10_000))
    long, short = tuple(range(ENOUGH)), tuple(range(8))
    queue(core, submit("a", WHOLE, prompt=long), submit("b", WHOLE, prompt=short))
    queue(core, submit("c", WHOLE, prompt=short))
    (part,) = take(core)
    assert part.keys == ("a#1",)
    run(core, (part,))
    (part,) = take(core)
    assert set(part.keys) == {"a#1", "b#1", "c#1"}
