"""Sequences that give their KV back to sequences that began before them."""

from services.node.core.microbatches import Emit, Failed, Free, Release, Sampled, Send
from services.node.core.rows import Row
from shared.messages.serving import AttemptFailed
from tests.support.submits import THREE, WHOLE
from tests.unit.node.batching.builders import (
    FROM_C,
    FULL,
    FakeKv,
    _cancel_of,
    batcher,
    come,
    forward,
    one,
    queue,
    run,
    take,
)


def test_the_last_that_began_is_preempted_and_begins_anew_with_its_tokens_so_far() -> None:
    core = batcher(step_tokens=8)
    queue(core, one("old", WHOLE, 2))
    run(core, take(core))
    queue(core, one("young", WHOLE, 3))
    run(core, take(core), token=9)
    (part,) = take(core)
    assert part.keys == ("old#1", "young#1")
    assert core.no_room(part, FULL) == [Release(("young#1",))]
    assert core.preemptions == 1
    assert core.live(part).keys == ("old#1",)
    assert core.waiting == 1
    run(core, (core.live(part),))
    (again,) = take(core)
    assert [(row.sequence, row.position, row.tokens) for row in again.rows] == [
        ("young#1~1", 0, (0, 1, 2, 9)),
        ("old#1", 4, (1,)),
    ]
    young = again.rows[0]
    assert young.draw is not None
    assert young.draw.index == 1


def test_a_preempted_sequence_goes_before_what_waits_and_keeps_its_age() -> None:
    kv = FakeKv(kv_capacity=40)
    core = batcher(step_tokens=8, kv=kv)
    for name in ("first", "second"):
        queue(core, one(name, WHOLE))
        run(core, take(core))
    kv.kv_used = 32
    queue(core, one("third", WHOLE))
    (part,) = take(core)
    core.no_room(part, FULL)
    kv.kv_used = 16
    run(core, (core.live(part),))
    (part,) = take(core)
    assert "second#1~1" in part.keys
    assert core.waiting == 1
    core.cancel(_cancel_of(one("first", WHOLE)))
    kv.kv_used = 0
    run(core, (core.live(part),))
    (part,) = take(core)
    assert sorted(part.keys) == ["second#1~1", "third#1"]
    assert core.no_room(part, FULL) == [Release(("third#1",))]


def test_on_a_path_preemption_frees_every_stage_and_tells_the_gateway() -> None:
    core = batcher()
    queue(core, one("old", WHOLE))
    take(core)
    young = one("young", THREE)
    queue(core, young)
    (part,) = take(core)
    assert core.no_room(part, FULL) == [
        Release(("young#1",)),
        Send("mem://b", Free(("young#1",))),
        Send("mem://c", Free(("young#1",))),
        Emit(young.gateway, AttemptFailed(young.request, 1, "capacity", "full")),
    ]
    assert core.received(Sampled(part.batch, (("young#1", (5,)),))) == []
    assert core.received(Failed(("young#1",), "not_found", "gone")) == []
    assert (core.running, core.waiting) == (1, 0)


def test_a_preempted_request_can_be_cancelled() -> None:
    core = batcher()
    queue(core, one("old", WHOLE), one("young", WHOLE))
    (part,) = take(core)
    core.no_room(part, FULL)
    assert core.cancel(_cancel_of(one("young", WHOLE))) == []
    assert core.waiting == 0


def test_a_followed_sequence_that_began_last_fails_at_its_leader_for_want_of_capacity() -> None:
    core = batcher()
    queue(core, one("led", WHOLE))
    (led,) = take(core)
    come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    assert core.no_room(led, FULL) == [
        Release(("x#1",)),
        Send("mem://c", Failed(("x#1",), "capacity", "full")),
    ]
    assert core.live(led).keys == ("led#1",)


def test_a_followed_sequence_that_began_first_goes_on() -> None:
    core = batcher()
    come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    followed = take(core)
    queue(core, one("led", WHOLE))
    take(core)
    assert core.no_room(followed[0], FULL) == [Release(("led#1",))]
    assert core.live(followed[0]).keys == ("x#1",)


def test_what_does_not_fit_alone_fails() -> None:
    core = batcher()
    queue(core, one("r", WHOLE))
    (part,) = take(core)
    released, told = core.no_room(part, FULL)
    assert core.preemptions == 0
    assert released == Release(("r#1",))
    assert isinstance(told, Emit)
    assert isinstance(told.what, AttemptFailed)
    assert told.what.code == "capacity"
