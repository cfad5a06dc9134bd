"""Whether a node has room, and that all stages of a path are asked before anything is run."""

import msgspec
import pytest

from services.node.core.batching import Batcher
from services.node.core.handover import secret_of
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Command,
    Emit,
    Failed,
    Failure,
    Forward,
    Free,
    Path,
    Sampled,
    Send,
    Settled,
)
from services.node.core.rows import Row
from shared.errors import CapacityExceeded, ProtocolViolation, TransportTimeout
from shared.ids import ModelId
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Cancel, Submit
from shared.slots import OVERFULL
from tests.support.submits import BLOCKS, MODEL, THREE, TWO, WHOLE, stages, submit
from tests.unit.node.batching.builders import FakeKv, ask, batcher, queue, rows, run, take

FROM_C = Path(MODEL, stages(("c", 0, 2), ("a", 2, BLOCKS)))


def prompt(name: str, path: tuple[Stage, ...], size: int, max_tokens: int = 30) -> Submit:
    return submit(name, path, prompt=(1,) * size, max_tokens=max_tokens)


def admit(key: str, tokens: int = 1, limit: int = 50, path: Path = FROM_C, stage: int = 1) -> Admit:
    return Admit(path, stage, key, tokens, limit)


def says(commands: list[Command]) -> list[object]:
    """What a follower answers, less the words."""
    found: list[object] = []
    for command in commands:
        assert isinstance(command, Send)
        message = command.message
        found.append((message.code, message.sequences) if isinstance(message, Failed) else message)
    return found


# --- leading ----------------------------------------------------------------


def test_nothing_of_a_sequence_runs_before_every_stage_has_room() -> None:
    core = batcher()
    message = prompt("r", THREE, 3)
    asked = core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS))
    path, secret = Path(MODEL, THREE), secret_of(message)
    assert asked == [
        Send("mem://b", Admit(path, 1, "r#1", 3, 32, secret=secret, pulls=True)),
        Send("mem://c", Admit(path, 2, "r#1", 3, 32, secret=secret, pulls=True)),
    ]
    assert core.take() == ()
    core.received(Admitted(2, "r#1"))
    core.received(Admitted(2, "r#1"))
    assert core.take() == ()
    assert core.waiting == 1
    core.received(Admitted(1, "r#1"))
    assert rows(take(core)) == [("r#1", 0, 3)]


def test_a_path_that_lacks_room_is_left_before_anything_was_run() -> None:
    core = batcher()
    message = prompt("r", THREE, 3)
    ask(core, message)
    core.received(Admitted(1, "r#1"))
    assert core.received(Failed(("r#1",), "capacity", "full")) == [
        Send("mem://b", Free(("r#1",))),
        Send("mem://c", Free(("r#1",))),
        Emit(message.gateway, AttemptFailed(message.request, 1, "capacity", "full")),
    ]
    core.received(Admitted(2, "r#1"))
    assert core.take() == ()
    assert (core.running, core.waiting) == (0, 0)


def test_the_leader_keeps_its_own_room_while_it_asks() -> None:
    core = batcher(kv=FakeKv(kv_capacity=64))
    ask(core, prompt("r", TWO, 20))
    with pytest.raises(CapacityExceeded, match="no KV cache left for request s"):
        ask(core, prompt("s", TWO, 20))
    queue(core, prompt("alone", WHOLE, 20))
    assert core.take() == ()
    core.cancel(Cancel(request=prompt("r", TWO, 1).request, attempt=1))
    assert rows(take(core)) == [("alone#1", 0, 4)]


def test_what_is_left_is_what_a_new_sequence_finds_when_all_others_have_theirs() -> None:
    kv = FakeKv(kv_capacity=200)
    core = batcher(kv=kv, step_tokens=100)
    assert core.kv_left([MODEL]) == {MODEL: 200}
    queue(core, prompt("runs", WHOLE, 20), prompt("long", WHOLE, 30, max_tokens=100))
    assert core.kv_left([MODEL]) == {MODEL: 200 - 48 - 48}
    run(core, take(core))
    kv.kv_used = 64
    assert core.kv_left([MODEL]) == {MODEL: 200 - 48 - 48}
    queue(core, prompt("waits", WHOLE, 100, max_tokens=50))
    assert core.kv_left([MODEL]) == {MODEL: 200 - 48 - 48 - 128}


def test_no_sequence_on_a_path_waits_behind_one_that_waits() -> None:
    kv = FakeKv(kv_capacity=80)
    core = batcher(kv=kv)
    queue(core, prompt("runs", WHOLE, 20))
    take(core)
    queue(core, prompt("waits", WHOLE, 40))
    with pytest.raises(CapacityExceeded, match="no KV cache left"):
        ask(core, prompt("path", TWO, 1))
    (refused,) = core.received(admit("x#1"))
    assert says([refused]) == [("capacity", ("x#1",))]


def test_a_question_that_no_stage_answers_is_stuck() -> None:
    core = batcher()
    message = prompt("r", TWO, 3)
    ask(core, message)
    assert ask(core, message) == []
    with pytest.raises(TransportTimeout, match="stuck"):
        ask(core, message)


def test_a_stage_that_is_lost_before_it_answers_ends_the_attempt() -> None:
    core = batcher()
    message = prompt("r", TWO, 3)
    ask(core, message)
    told = core.peer_lost("mem://b", Failure("peer_lost", "gone"))
    assert Emit(message.gateway, AttemptFailed(message.request, 1, "peer_lost", "gone")) in told
    assert core.waiting == 0


# --- following --------------------------------------------------------------


def test_a_stage_answers_at_once_and_counts_what_it_keeps_for_others() -> None:
    """Each will soon have the pages of its tokens and one more."""
    core = batcher(kv=FakeKv(kv_capacity=96))
    assert says(core.received(admit("x#1", tokens=20))) == [Admitted(1, "x#1")]
    assert says(core.received(admit("y#1", tokens=40))) == [("capacity", ("y#1",))]
    assert says(core.received(admit("z#1", tokens=20))) == [Admitted(1, "z#1")]
    with pytest.raises(CapacityExceeded, match="no KV cache left"):
        ask(core, prompt("led", TWO, 1))
    core.received(Free(("x#1",)))
    ask(core, prompt("led", TWO, 1))


def test_what_a_sequence_took_is_not_kept_for_it_again() -> None:
    kv = FakeKv(kv_capacity=96)
    core = batcher(kv=kv)
    core.received(admit("x#1", tokens=20))
    core.received(Forward(FROM_C, 1, 1, (Row("x#1", 0, 20, 50),)))
    assert says(core.received(admit("y#1", tokens=36))) == [("capacity", ("y#1",))]
    take(core)
    kv.kv_used = 32
    assert says(core.received(admit("y#1", tokens=32))) == [Admitted(1, "y#1")]


def test_slots_are_counted_over_what_is_led_and_followed() -> None:
    core = batcher(slots=2, kv=FakeKv(kv_capacity=10_000))
    share = (BLOCKS - 2) / BLOCKS / 2
    most = int(OVERFULL * 2 / share)
    for i in range(most):
        assert says(core.received(admit(f"x{i}#1"))) == [Admitted(1, f"x{i}#1")]
    assert says(core.received(admit("more#1"))) == [("capacity", ("more#1",))]
    with pytest.raises(CapacityExceeded, match="submit elsewhere"):
        ask(core, prompt("led", stages(("a", 0, 4), ("b", 4, BLOCKS)), 1))
    other = Path(ModelId("other"), FROM_C.stages)
    assert says(core.received(admit("other#1", path=other))) == [Admitted(1, "other#1")]
    queue(core, prompt("alone", WHOLE, 1))


@pytest.mark.parametrize(
    ("kv", "code"),
    [(FakeKv(kv_capacity=32), "capacity"), (FakeKv(kv_capacity=0), "not_found")],
    ids=["too small", "no model"],
)
def test_what_can_never_run_here_is_refused(kv: FakeKv, code: str) -> None:
    assert says(batcher(kv=kv).received(admit("x#1", limit=33))) == [(code, ("x#1",))]


def test_a_stage_without_kv_has_room_for_any_length() -> None:
    core = batcher(kv=FakeKv(kv_capacity=16, without={MODEL}))
    assert says(core.received(admit("x#1", tokens=100, limit=100))) == [Admitted(1, "x#1")]
    assert says(core.received(admit("y#1", tokens=100, limit=100))) == [Admitted(1, "y#1")]


def test_a_sequence_is_admitted_once() -> None:
    core = batcher()
    core.received(admit("x#1"))
    assert says(core.received(admit("x#1"))) == [("conflict", ("x#1",))]
    assert core.running == 1
    core.received(Free(("x#1",)))
    assert says(core.received(admit("x#1"))) == [("conflict", ("x#1",))]
    assert core.running == 0


def test_a_question_for_another_node_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        batcher("z").received(admit("x#1"))


def test_a_row_of_a_sequence_that_was_not_admitted_fails_at_its_leader() -> None:
    core: Batcher = batcher()
    told = core.received(Forward(FROM_C, 1, 1, (Row("x#1", 0, 1, 9),)))
    assert says(told) == [("not_found", ("x#1",))]
    assert core.take() == ()


def test_a_row_with_another_limit_fails_at_its_leader() -> None:
    core = batcher()
    core.received(admit("x#1", limit=9))
    (_, told) = core.received(Forward(FROM_C, 1, 1, (Row("x#1", 0, 1, 90),)))
    assert says([told]) == [("not_found", ("x#1",))]


# --- requests that may kill nodes --------------------------------------------


def test_nothing_begins_where_a_suspect_is_tried_until_it_is_past() -> None:
    core = batcher()
    queue(core, prompt("before", WHOLE, 1))
    run(core, take(core))
    suspect = msgspec.structs.replace(prompt("r", WHOLE, 2), alone_until=4)
    queue(core, suspect)
    for _ in range(2):
        with pytest.raises(CapacityExceeded, match="while it tries request r"):
            queue(core, prompt("s", WHOLE, 1))
        assert says(core.received(admit("x#1"))) == [("capacity", ("x#1",))]
        run(core, take(core))
        core.validate()
    assert {key for key, *_ in rows(take(core))} == {"before#1", "r#1"}, "who ran goes on"
    queue(core, prompt("s", WHOLE, 1))
    assert says(core.received(admit("y#1"))) == [Admitted(1, "y#1")]


def test_two_suspects_do_not_meet_and_a_later_attempt_of_one_is_no_other() -> None:
    core = batcher()
    suspect = msgspec.structs.replace(prompt("r", WHOLE, 2), alone_until=9)
    queue(core, suspect)
    with pytest.raises(CapacityExceeded, match="while it tries request r"):
        queue(core, msgspec.structs.replace(prompt("s", WHOLE, 2), alone_until=9))
    queue(core, msgspec.structs.replace(suspect, attempt=2))
    assert rows(take(core)) == [("r#2", 0, 2)]


def test_a_suspect_waits_for_no_room() -> None:
    core = batcher(kv=FakeKv(kv_capacity=80))
    queue(core, prompt("runs", WHOLE, 20))
    take(core)
    with pytest.raises(CapacityExceeded, match="no KV cache left"):
        queue(core, msgspec.structs.replace(prompt("r", WHOLE, 40), alone_until=43))
    queue(core, prompt("other", WHOLE, 40))


@pytest.mark.parametrize("told", [False, True])
def test_every_stage_of_a_path_is_told_of_a_suspect_and_begins_nothing_else_meanwhile(
    told: bool,
) -> None:
    """Until its leader says that it has the tokens, or has the last of them run."""
    (asked,) = ask(batcher(), msgspec.structs.replace(prompt("r", TWO, 2), alone_until=3))
    assert asked.alone_until == 3
    core = batcher()
    core.received(msgspec.structs.replace(admit("x#1", tokens=2), alone_until=4))
    for position, count in ((0, 2), (2, 1)):
        with pytest.raises(CapacityExceeded, match="while it tries request x"):
            queue(core, prompt("s", WHOLE, 1))
        core.received(Forward(FROM_C, 1, 1, (Row("x#1", position, count, 50),)))
        running = take(core)
        run(core, running)
        with pytest.raises(CapacityExceeded, match="while it tries request x"):
            queue(core, prompt("s", WHOLE, 1))
    if told:
        assert core.received(Free((), tried=("x#1",))) == []
    else:
        core.received(Forward(FROM_C, 1, 1, (Row("x#1", 3, 1, 50),)))
    queue(core, prompt("s", WHOLE, 1))


def test_a_leader_tells_its_path_of_the_last_token_of_a_trial_before_its_gateway() -> None:
    core = batcher()
    ask(core, msgspec.structs.replace(prompt("r", TWO, 2), alone_until=4))
    core.received(Admitted(1, "r#1"))
    for token in range(2):
        (part,) = take(core)
        run(core, (part,))
        commands = core.received(Sampled(part.batch, (("r#1", (token,)),)))
        told = [each.message for each in commands if isinstance(each, Send)]
        assert told == ([Free((), tried=("r#1",))] if token else [])
        assert isinstance(commands[-1], Emit)
    core.validate()


def test_a_suspect_has_begun_on_a_path_when_every_stage_has_room() -> None:
    core = batcher()
    ask(core, msgspec.structs.replace(prompt("r", THREE, 2), alone_until=3))
    assert core.unsettled("r#1")
    assert core.received(Admitted(1, "r#1")) == []
    assert core.unsettled("r#1")
    assert core.received(Admitted(2, "r#1")) == [Settled("r#1")]
    assert not core.unsettled("r#1")


def test_who_is_no_suspect_is_taken_before_the_other_stages_answer() -> None:
    core = batcher()
    ask(core, prompt("r", THREE, 2))
    assert not core.unsettled("r#1")


@pytest.mark.parametrize("late", [False, True])
def test_a_suspect_that_ends_before_every_stage_has_room_has_not_begun(late: bool) -> None:
    core = batcher()
    ask(core, msgspec.structs.replace(prompt("r", THREE, 2), alone_until=3))
    core.received(Admitted(1, "r#1"))
    lost = Failure("peer_lost", "c died")
    ended = core.late("r#1") if late else core.peer_lost("mem://c", lost)
    assert Settled("r#1", over=True) in ended
    (told,) = (command.what for command in ended if isinstance(command, Emit))
    assert isinstance(told, AttemptFailed)
    assert not core.unsettled("r#1")
