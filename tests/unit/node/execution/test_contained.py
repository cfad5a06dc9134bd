"""What a bug, or a peer's nonsense, may end: itself, or the sequences it names; not the node."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.node.core.microbatches import (
    Admit,
    Admitted,
    Failed,
    Forward,
    Free,
    Path,
    Sampled,
    StageMessage,
)
from services.node.core.rows import Context, Draw, Row
from services.node.core.watchdog import FAILURES
from services.node.execution import activations
from shared.errors import CapacityExceeded, EngineFailed, LambdaScaleError, PeerLost
from shared.ids import RequestId
from shared.messages.serving import Cancel, LogitRules, Sampling
from tests.support.amounts import examples
from tests.support.hash_engine import HIDDEN, HashSweep, continuation
from tests.support.malformed import well_framed
from tests.support.submits import BLOCKS, MODEL, TWO, WHOLE, submit
from tests.unit.node.execution.test_steps import FROM_C, Rig, hidden_states

LIKELY: dict[str, Any] = {
    "sequence": ["r#1", "a#1", "b"],
    "sequences": [("r#1",), ("a#1", "b")],
    "batch": [0, 1, 2, 3],
    "position": [0, 1, 2],
    "count": [1, 2],
    "limit": [9],
    "stage": [0, 1],
    "image": [b""],
}
ANYTHING = st.one_of(
    well_framed(Admit, **LIKELY, tokens=[1, 9, 10]),
    well_framed(Forward, **LIKELY, tokens=[(), (1,)]),
    *(well_framed(kind, **LIKELY) for kind in (Admitted, Free, Failed)),
    well_framed(Sampled, batch=[1, 2], tokens=[(("r#1", (7,)),), (("a#1", ()),)]),
)
PROMPT = (3, 1, 4, 1, 5)
RULED = Context((1,), 1, (), LogitRules(grammar="g"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """To draw every traceback with its locals would take most of the time."""
    with capture_logs():
        yield


def bug(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


def deliver(rig: Rig, message: StageMessage, width: int = HIDDEN) -> None:
    payload = b""
    if isinstance(message, Forward):
        positions = sum(row.count for row in message.rows)
        payload = bytes(4 * width * positions) if 0 <= positions < 1000 else b""
    header = {
        "v": activations.VERSION,
        "message": message,
        "dtype": "float32",
        "hidden_size": width,
    }
    encoded = msgspec.msgpack.encode(header)
    rig.steps.received("tcp://peer", memoryview(encoded), memoryview(bytearray(payload)))


def still_serves(rig: Rig) -> None:
    rig.emitted.clear()
    rig.steps.submit(submit("healthy", WHOLE, prompt=PROMPT, max_tokens=3))
    rig.run()
    rig.steps.flush()
    said = [token for _, message in rig.emitted for token in message.tokens]
    assert [token.token for token in said if token.request == "healthy"] == continuation(
        PROMPT, 3, BLOCKS
    )


def failures(rig: Rig) -> list[tuple[str, str]]:
    rig.steps.flush()
    return [(f.request, f.code) for _, message in rig.emitted for f in message.failed]


# --- what peers say -------------------------------------------------------------------


def for_us(message: StageMessage) -> StageMessage:
    """Often over a path on which this node comes second, about sequences that it may know. None is
    on trial: it would keep others out until it ends, as it should."""
    if isinstance(message, Forward) and message.batch % 2:
        return msgspec.structs.replace(message, path=FROM_C, stage=1)
    if isinstance(message, Admit):
        path = FROM_C if message.stage else message.path
        return msgspec.structs.replace(message, path=path, alone_until=0)
    return message


@settings(max_examples=examples(80), suppress_health_check=list(HealthCheck))
@given(st.lists(ANYTHING, max_size=12))
def test_no_messages_end_the_node_or_reach_a_bug(messages: list[StageMessage]) -> None:
    rig = Rig()
    rig.steps.submit(submit("a", WHOLE, max_tokens=3))
    rig.submit(submit("r", TWO, max_tokens=3))
    for message in map(for_us, messages):
        deliver(rig, message)
        rig.step()
    rig.run()
    assert rig.steps.load.faults == 0
    still_serves(rig)


def test_a_second_row_of_a_sequence_whose_grammar_is_made_ends_it() -> None:
    rig = Rig()
    asked: list[Callable[[], Callable[[], None]]] = []
    rig.steps._grammars.aside = asked.append
    row = Row("g#1", 0, 1, 9, (), Draw(0, Sampling(), RULED))
    for each in (
        row,
        Row("g#1", 1, 1, 9, (), Draw(0, Sampling(), Context((1, 1), 2, (), RULED.rules))),
    ):
        rig.receive(FROM_C, (each,), hidden_states(1))
    for work in asked:
        work()()
    rig.run()
    assert (rig.steps.load.running, rig.steps.load.faults) == (0, 0)
    still_serves(rig)


def test_a_message_that_meets_a_bug_ends_the_sequences_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.submit(submit("led", TWO, max_tokens=3))
    rig.steps.submit(submit("other", WHOLE, max_tokens=1))
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9), Row("y#1", 0, 1, 9)), hidden_states(1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(rig.steps._batcher, "received", bug)
        deliver(rig, Sampled(1, (("led#1", (7,)),)))
        rig.receive(FROM_C, (Row("x#1", 1, 1, 9),), hidden_states(1))
    assert failures(rig) == [("led", EngineFailed.code)]
    (to_leader,) = [m for m in sent(rig, "mem://c") if isinstance(m, Failed)]
    assert to_leader.sequences == ("x#1",)
    assert rig.steps.load.faults == 2
    assert rig.steps.load.running + rig.steps.load.waiting == 2
    still_serves(rig)


def sent(rig: Rig, address: str) -> list[StageMessage]:
    return [
        activations.decode(memoryview(h), memoryview(bytearray(b"".join(p))))[0]
        for a, h, p in rig.sent
        if a == address
    ]


# --- bugs of our own ------------------------------------------------------------------


def test_a_command_that_fails_ends_its_sequences_and_leaves_none_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.submit(submit("led", TWO, max_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(activations, "encode", bug)
        rig.run()
    assert failures(rig) == [("led", EngineFailed.code)]
    assert rig.engine.sequences == {}
    still_serves(rig)


def test_kv_that_cannot_be_freed_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.submit(submit("led", TWO, max_tokens=3))
    rig.run()
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "free", bug)
        rig.steps.peer_lost("mem://b", PeerLost("gone"))
    assert failures(rig) == [("led", PeerLost.code)]
    assert rig.steps.load.faults == 1
    still_serves(rig)


@pytest.mark.parametrize("method", ["take", "ran"])
def test_a_step_that_fails_ends_what_runs_and_waits(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.steps.submit(submit("led", WHOLE, max_tokens=3))
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    with monkeypatch.context() as patch:
        patch.setattr(rig.steps._batcher, method, bug)
        while rig.steps.load.running + rig.steps.load.waiting:
            rig.step()
    assert failures(rig) == [("led", EngineFailed.code)]
    assert [type(m) for m in sent(rig, "mem://c")] == [Failed]
    assert (rig.steps.load.running, rig.engine.sequences) == (0, {})
    still_serves(rig)


def test_an_engine_that_raises_blames_all_that_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for name in ("a", "b"):
        rig.steps.submit(submit(name, WHOLE, max_tokens=3))
    with monkeypatch.context() as patch:
        patch.setattr(HashSweep, "advance", bug)
        rig.step()
    assert sorted(failures(rig)) == [("a", EngineFailed.code), ("b", EngineFailed.code)]
    assert rig.steps.load.faults == 1
    still_serves(rig)


@pytest.mark.parametrize("error", [MemoryError("host"), torch.OutOfMemoryError("device")])
def test_an_engine_without_memory_takes_smaller_steps_and_then_refuses_the_request(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, room, advance = Rig(), 5, HashSweep.advance

    def short_of_memory(sweep: HashSweep, *given: Any) -> Any:
        rows = [row for rider in sweep._riders.values() for row in rider.part.rows]
        if sum(row.count for row in rows) > room:
            raise error
        return advance(sweep, *given)

    monkeypatch.setattr(HashSweep, "advance", short_of_memory)
    codes: list[list[str]] = []

    def ask(name: str, size: int) -> None:
        prompt = (1,) * size
        rig.steps.submit(submit(name, WHOLE, prompt=prompt, max_tokens=2, attempt=len(codes) + 1))

    while len(codes) < 4:
        ask("long", 40)
        ask("other", 2)
        rig.run()
        codes.append([code for _, code in failures(rig)])
        rig.emitted.clear()
    assert {code for found in codes for code in found} == {CapacityExceeded.code}
    assert codes[0]
    assert codes[2:] == [[], []], "16 positions, 8, and then 4 in a step"
    room = 0
    while codes[-1] != [EngineFailed.code]:
        ask("lone", 5)
        rig.run()
        codes.append([code for _, code in failures(rig)])
        rig.emitted.clear()
        assert len(codes) < 9


def test_a_step_that_fails_with_nothing_to_end_ends_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.steps._batcher, "take", bug)
    with pytest.raises(ZeroDivisionError):
        rig.steps.begin(0.0)


def test_events_that_nobody_waits_for_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    with monkeypatch.context() as patch:
        patch.setattr(rig.steps._batcher, "cancel", bug)
        patch.setattr(rig.steps._batcher, "peer_lost", bug)
        patch.setattr(rig.engine, "use_tokenizer", bug)
        rig.steps.cancel(Cancel(request=RequestId("r"), attempt=1))
        rig.steps.peer_lost("mem://b", PeerLost("gone"))
        rig.steps.use_tokenizer(MODEL, b"")
    assert rig.steps.load.faults == 3
    still_serves(rig)


def test_rules_that_cannot_be_used_end_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "use_rules", bug)
        rig.steps.submit(submit("g", WHOLE, rules=LogitRules(grammar="g")))
    assert failures(rig) == [("g", EngineFailed.code)]
    still_serves(rig)


# --- the engine, for a model ------------------------------------------------------------


@pytest.mark.parametrize("error", [MemoryError("all gone"), torch.OutOfMemoryError("CUDA, too")])
def test_a_block_for_which_there_is_no_memory_is_refused(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()

    def attach(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(rig.engine, "attach", attach)
        with pytest.raises(CapacityExceeded, match=str(error)):
            rig.steps.attach(MODEL, 0, memoryview(b""))
    still_serves(rig)


@pytest.mark.parametrize("method", ["attach", "open_model", "close_model"])
def test_what_the_engine_cannot_do_for_a_model_is_typed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    calls = {
        "attach": lambda: rig.steps.attach(MODEL, 0, memoryview(b"")),
        "open_model": lambda: rig.steps.open_model(MODEL, rig.steps._models[MODEL]),
        "close_model": lambda: rig.steps.close_model(MODEL),
    }
    monkeypatch.setattr(rig.engine, method, bug)
    with pytest.raises(LambdaScaleError, match="a bug"):
        calls[method]()


def test_a_model_whose_blocks_all_fail_is_one_failure_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model may be broken, and its node is not. One that fails with all that comes is."""
    rig = Rig()
    manifest = rig.steps._models[MODEL]
    for opened in range(1, FAILURES + 1):
        rig.steps.open_model(MODEL, manifest)
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine, "attach", bug)
            for block in range(2 * FAILURES):
                with pytest.raises(EngineFailed):
                    rig.steps.attach(MODEL, block, memoryview(b""))
        assert rig.steps.failed_in_a_row == opened


def test_a_path_over_this_node_alone_is_no_path_of_a_peer() -> None:
    rig = Rig()
    deliver(rig, Forward(Path(MODEL, WHOLE), 0, 1, (Row("x#1", 0, 1, 9),)))
    assert (rig.steps.load.violations, rig.steps.load.running) == (1, 0)
