import pytest
import torch

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
from services.node.core.rows import Draw, Row
from services.node.core.sequences import sequence_key
from services.node.engine.base import StagePart
from services.node.execution import activations
from services.node.execution.steps import Steps
from services.node.transport.base import Buffer
from shared.errors import BadInput, PeerLost
from shared.ids import GatewayId, ModelId, NodeId
from shared.messages.instances import Stage
from shared.messages.serving import Sampling, Submit, Tokens
from tests.support.hash_engine import HIDDEN, HashEngine, hash_manifest
from tests.support.submits import BLOCKS, MODEL, THREE, TWO, WHOLE, stages, submit

FROM_C = Path(MODEL, stages(("c", 0, 2), ("a", 2, BLOCKS)))
FROM_D = Path(MODEL, stages(("d", 0, 2), ("a", 2, BLOCKS)))
FROM_E = Path(MODEL, stages(("e", 0, 3), ("a", 3, BLOCKS)))
EARLY = Path(MODEL, stages(("d", 0, 2), ("a", 2, 4), ("f", 4, BLOCKS)))
LATE = Path(MODEL, stages(("g", 0, 5), ("a", 5, BLOCKS)))

NOW = 1000.0


class Rig:
    """One node's steps, and what leaves it."""

    def __init__(self, *, step_floor_s: float = 0.0, kv: int = 100) -> None:
        self.engine = HashEngine(kv, floor_s=step_floor_s)
        self.sent: list[tuple[str, bytes, list[Buffer]]] = []
        self.emitted: list[tuple[GatewayId, Tokens]] = []
        self.until: list[float] = []
        """What each step waited for."""
        self.ran: list[tuple[ModelId, float, float, float]] = []
        self.steps = Steps(
            node=NodeId("a"),
            engine=self.engine,
            slots=4,
            step_tokens=16,
            send=lambda address, header, payload: self.sent.append(
                (address, header, list(payload))
            ),
            emit=lambda gateway, tokens: self.emitted.append((gateway, tokens)),
            ran=lambda *sweep: self.ran.append(sweep),
        )
        self.steps.open_model(MODEL, hash_manifest(BLOCKS))
        for block in range(BLOCKS):
            self.steps.attach(MODEL, block, memoryview(b""))

    def step(self) -> bool:
        """One block."""
        until = self.steps.begin(NOW)
        if until is None:
            return False
        self.until.append(until)
        self.steps.finish(0.0)
        return True

    def run(self) -> None:
        """Until there is nothing to do."""
        while self.step():
            pass

    def submit(self, message: Submit) -> None:
        """All stages of its path have room."""
        self.steps.submit(message)
        key = sequence_key(message.request, message.attempt)
        self._agree(*(Admitted(stage, key) for stage in range(1, len(message.stages))))
        self.sent.clear()

    def _agree(self, *messages: StageMessage) -> None:
        for message in messages:
            header, _ = activations.encode(message, None)
            self.steps.received("mem://x", memoryview(header), memoryview(b""))

    def receive(self, path: Path, rows: tuple[Row, ...], hidden: torch.Tensor) -> None:
        """A micro-batch of sequences that begin with it."""
        before = len(self.sent)
        new = [row for row in rows if not row.position]
        self._agree(*(Admit(path, 1, row.sequence, row.count, row.limit) for row in new))
        del self.sent[before:]
        header, payload = activations.encode(Forward(path, 1, 1, rows), hidden)
        body = memoryview(bytearray(b"".join(payload)))
        self.steps.received("mem://x", memoryview(header), body)


def hidden_states(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1).repeat(1, HIDDEN)


@pytest.mark.parametrize(("path", "n_blocks"), [(WHOLE, BLOCKS), (TWO, 2), (THREE, 1)])
def test_a_step_takes_its_share_of_the_floor(path: tuple[Stage, ...], n_blocks: int) -> None:
    rig = Rig(step_floor_s=60.0)
    rig.submit(submit("r", path, max_tokens=1))
    rig.run()
    assert rig.until == pytest.approx([1000.0 + 10.0 * i for i in range(1, n_blocks + 1)])


def test_a_sweep_takes_the_share_of_all_its_blocks() -> None:
    rig = Rig(step_floor_s=60.0)
    rig.receive(EARLY, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.receive(FROM_E, (Row("y#1", 0, 1, 9),), hidden_states(1))
    rig.receive(LATE, (Row("z#1", 0, 1, 9),), hidden_states(1))
    rig.run()
    assert rig.until == pytest.approx([1010.0, 1020.0, 1030.0, 1040.0])


def test_what_got_off_is_handed_on_when_its_time_is_over() -> None:
    rig = Rig()
    rig.receive(LATE, (Row("x#1", 0, 1, 9), Row("y#1", 0, 1, 9)), hidden_states(1, 2))
    assert rig.steps.begin(NOW) is not None
    header, _ = activations.encode(Free(("x#1",)), None)
    rig.steps.received("mem://g", memoryview(header), memoryview(b""))
    assert rig.sent == []
    rig.steps.finish(0.0)
    ((_, sent, _),) = rig.sent
    sampled, _, cause = activations.decode(memoryview(sent), memoryview(b""))
    assert isinstance(sampled, Sampled)
    assert cause == "batch 1 of g"
    assert rig.steps.load.running == 1
    rig.steps.finish(0.0)
    assert len(rig.sent) == 1


def test_an_engine_that_breaks_after_a_part_got_off_fails_the_others() -> None:
    rig = Rig()
    rig.receive(EARLY, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.receive(FROM_C, (Row("y#1", 0, 1, 9),), hidden_states(2))
    rig.step()
    rig.step()

    def breaks(block: int, part: StagePart) -> None:
        raise RuntimeError("out of order")

    rig.engine.before_run = breaks
    rig.run()
    messages = [
        (a, activations.decode(memoryview(h), memoryview(bytearray(b"".join(p))))[0])
        for a, h, p in rig.sent
    ]
    assert [(a, type(message)) for a, message in messages] == [
        ("mem://f", Forward),
        ("mem://c", Failed),
    ]


def test_a_row_that_cannot_be_drawn_fails_alone() -> None:
    rig = Rig()
    rig.engine.failing["odd#1"] = BadInput("no token fits")
    for name in ("one", "odd", "two"):
        rig.submit(submit(name, WHOLE, max_tokens=2))
    rig.run()
    rig.steps.flush()
    ((_, tokens),) = rig.emitted
    (failed,) = tokens.failed
    assert (failed.request, failed.code, failed.message) == ("odd", "bad_input", "no token fits")
    assert [token.request for token in tokens.tokens] == ["one", "two"] * 2
    assert (rig.steps.load.running, rig.engine.sequences) == (0, {})


def test_a_later_stage_tells_the_leader_why_a_row_could_not_be_drawn() -> None:
    rig = Rig()
    rig.engine.failing["x#1"] = BadInput("no token fits")
    rows = tuple(Row(key, 0, 1, 9, (), Draw(0, Sampling())) for key in ("x#1", "y#1"))
    rig.receive(LATE, rows, hidden_states(1, 2))
    rig.run()
    messages = [activations.decode(memoryview(h), memoryview(b""))[0] for _, h, _ in rig.sent]
    assert [type(message) for message in messages] == [Failed, Sampled]
    assert messages[0] == Failed(("x#1",), "bad_input", "no token fits")
    assert set(rig.engine.sequences) == {"y#1"}


def test_gateways_hear_with_each_token_how_much_kv_is_free() -> None:
    rig = Rig(kv=100)
    rig.submit(submit("r", WHOLE, prompt=(3, 1, 4, 1, 5), max_tokens=3))
    used = []
    while rig.step():
        used.append(rig.engine.kv_used)
        rig.steps.flush()
    told = [tokens.kv_free for _, tokens in rig.emitted]
    assert told == [{MODEL: rig.engine.kv_capacity - each} for each in used[BLOCKS - 1 :: BLOCKS]]
    assert len(set(used)) > 1


def test_of_a_model_that_keeps_no_kv_gateways_hear_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HashEngine, "kv_share", lambda engine, model: 0)
    monkeypatch.setattr(HashEngine, "keeps", lambda engine, *part: False)
    rig = Rig()
    rig.submit(submit("r", WHOLE, max_tokens=1))
    rig.run()
    rig.steps.flush()
    assert [tokens.kv_free for _, tokens in rig.emitted] == [{}]


def test_nothing_to_run_is_no_step() -> None:
    rig = Rig()
    assert not rig.step()
    rig.submit(submit("r", TWO))
    rig.run()
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[0, 1]]
    assert not rig.step()


def test_merged_micro_batches_reach_the_engine_as_one_and_leave_as_two() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 2, 9),), hidden_states(1, 2))
    rig.receive(FROM_D, (Row("y#1", 0, 1, 9),), hidden_states(3))
    rig.run()
    (sweep,) = rig.engine.sweeps
    assert [part.hidden[:, 0].tolist() for part in sweep.parts if part.hidden is not None] == [
        [1, 2],
        [3],
    ]
    assert sweep.ran == [2, 3, 4, 5]
    assert [address for address, _, _ in rig.sent] == ["mem://c", "mem://d"]


def test_a_sweep_runs_each_block_once_and_skips_those_that_none_needs() -> None:
    rig = Rig()
    rig.submit(submit("led", stages(("a", 0, 1), ("b", 1, BLOCKS)), max_tokens=1))
    rig.receive(FROM_E, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.receive(LATE, (Row("y#1", 0, 1, 9),), hidden_states(2))
    rig.run()
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[0, 3, 4, 5]]


def test_a_part_is_passed_on_as_soon_as_it_leaves() -> None:
    rig = Rig()
    rig.receive(EARLY, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.receive(FROM_C, (Row("y#1", 0, 1, 9),), hidden_states(2))
    sent = []
    while rig.step():
        sent.append([address for address, _, _ in rig.sent])
    assert sent == [[], ["mem://f"], ["mem://f"], ["mem://f", "mem://c"]]


def test_what_comes_during_a_sweep_joins_at_a_block_ahead() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.step()
    rig.receive(FROM_E, (Row("y#1", 0, 1, 9),), hidden_states(2))
    rig.receive(FROM_D, (Row("late#1", 0, 1, 9),), hidden_states(3))
    rig.run()
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[2, 3, 4, 5]] * 2
    assert [[part.rows[0].sequence for part in sweep.parts] for sweep in rig.engine.sweeps] == [
        ["x#1", "y#1"],
        ["late#1"],
    ]


def test_no_room_for_a_part_that_would_join() -> None:
    """It has come to more pages than were kept for it: the last that began makes room."""
    rig = Rig(kv=64)
    for position in (0, 16):
        grown = Row("grows#1", position, 16, 60)
        rig.receive(FROM_E, (grown,), hidden_states(*range(16)))
        rig.run()
    rig.receive(FROM_C, (Row("last#1", 0, 1, 9),), hidden_states(1))
    rig.receive(FROM_E, (Row("grows#1", 32, 16, 60),), hidden_states(*range(16)))
    rig.run()
    rig.sent.clear()
    rig.receive(FROM_E, (Row("grows#1", 48, 1, 60),), hidden_states(2))
    rig.run()
    (to_c, failed), (to_e, sampled) = [
        (a, activations.decode(memoryview(h), memoryview(b""))[0]) for a, h, _ in rig.sent
    ]
    assert (to_c, to_e) == ("mem://c", "mem://e")
    assert isinstance(failed, Failed)
    assert (failed.sequences, failed.code) == (("last#1",), "capacity")
    assert isinstance(sampled, Sampled)
    assert sampled.keys == ("grows#1",)


def test_a_part_that_cannot_be_run_fails_alone() -> None:
    rig = Rig()
    rig.engine.attached[MODEL] = {2, 3, 4, 5}
    bad = Path(MODEL, stages(("c", 0, 1), ("a", 1, BLOCKS)))
    rig.receive(bad, (Row("bad#1", 0, 1, 9),), hidden_states(1))
    rig.receive(FROM_D, (Row("x#1", 0, 1, 9),), hidden_states(2))
    rig.run()
    messages = [activations.decode(memoryview(h), memoryview(b""))[0] for _, h, _ in rig.sent]
    assert [type(message) for message in messages] == [Failed, Sampled]


def test_rows_freed_during_a_sweep_leave_it() -> None:
    rig = Rig()
    rig.receive(EARLY, (Row("x#1", 0, 2, 9), Row("y#1", 0, 1, 9)), hidden_states(1, 2, 3))
    rig.receive(FROM_C, (Row("z#1", 0, 1, 9),), hidden_states(4))
    rig.step()
    for key in ("x#1", "z#1"):
        header, _ = activations.encode(Free((key,)), None)
        rig.steps.received("mem://c", memoryview(header), memoryview(b""))
    rig.run()
    ((address, sent, payload),) = rig.sent
    forward, hidden, _ = activations.decode(memoryview(sent), memoryview(bytearray(payload[0])))
    assert address == "mem://f"
    assert isinstance(forward, Forward)
    assert [row.sequence for row in forward.rows] == ["y#1"]
    assert hidden is not None
    alone = Rig()
    alone.receive(EARLY, (Row("y#1", 0, 1, 9),), hidden_states(3))
    alone.run()
    assert bytes(payload[0]) == bytes(alone.sent[0][2][0])
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[2, 3]]


def free(rig: Rig, *keys: str) -> None:
    header, _ = activations.encode(Free(keys), None)
    rig.steps.received("mem://c", memoryview(header), memoryview(b""))


def test_what_is_freed_before_its_first_block_was_not_run() -> None:
    rig = Rig()
    rig.receive(EARLY, (Row("x#1", 0, 3, 9),), hidden_states(1, 2, 3))
    rig.step()
    rig.receive(LATE, (Row("y#1", 0, 1, 9),), hidden_states(4))
    rig.step()
    free(rig, "y#1")
    rig.run()
    assert [(share * BLOCKS, tokens) for _, share, tokens, _ in rig.ran] == [(2, 3)]


def test_a_sweep_of_which_everything_was_freed_tells_nothing() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.step()
    free(rig, "x#1")
    rig.run()
    assert rig.ran == []


def test_a_model_closed_during_a_sweep_ends_it() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.step()
    rig.steps.close_model(MODEL)
    rig.run()
    assert [sweep.ran for sweep in rig.engine.sweeps] == [[2]]
    assert rig.steps.load.running == 0


def test_hidden_states_follow_their_rows_when_others_go() -> None:
    rig = Rig()
    rows = (Row("big#1", 0, 1, 9), Row("x#1", 0, 2, 9), Row("bigger#1", 0, 1, 200))
    rig.receive(FROM_C, rows, hidden_states(1, 2, 3, 4))
    header, _ = activations.encode(Free(("big#1",)), None)
    rig.steps.received("mem://c", memoryview(header), memoryview(b""))
    assert rig.step()
    (part,) = rig.engine.sweeps[0].parts
    assert [row.sequence for row in part.rows] == ["x#1"]
    assert part.hidden is not None
    assert part.hidden[:, 0].tolist() == [2, 3]


def test_hidden_states_of_another_width_are_a_violation() -> None:
    rig = Rig()
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), torch.zeros(1, HIDDEN + 1))
    assert not rig.step()
    assert rig.steps.load.violations == 1


def test_a_micro_batch_for_another_node_is_a_violation() -> None:
    rig = Rig()
    rig.receive(Path(MODEL, TWO), (Row("x#1", 0, 1, 9),), hidden_states(1))
    assert not rig.step()
    assert rig.steps.load.violations == 2
    assert rig.sent == []


def test_tokens_of_a_step_go_out_together() -> None:
    rig = Rig()
    for name, gateway in (("x", "g"), ("y", "h"), ("z", "g")):
        rig.submit(submit(name, WHOLE, gateway=GatewayId(gateway), max_tokens=1))
    rig.run()
    assert rig.emitted == []
    rig.steps.flush()
    rig.steps.flush()
    assert [(g, [t.request for t in m.tokens]) for g, m in rig.emitted] == [
        ("g", ["x", "z"]),
        ("h", ["y"]),
    ]


def test_closing_a_model_ends_its_attempts_at_once() -> None:
    rig = Rig()
    rig.submit(submit("led", WHOLE))
    rig.receive(FROM_C, (Row("x#1", 0, 1, 9),), hidden_states(1))
    rig.step()
    rig.steps.close_model(MODEL)
    rig.steps.flush()
    assert [failed.code for _, m in rig.emitted for failed in m.failed] == ["not_found"]
    address, header, _ = rig.sent[-1]
    told, _, _ = activations.decode(memoryview(header), memoryview(b""))
    assert address == "mem://c"
    assert isinstance(told, Failed)
    assert (told.sequences, told.code) == (("x#1",), "not_found")
    assert (rig.steps.load.running, rig.steps.load.kv_used) == (0, 0)


def test_the_story_of_a_request_names_what_led_to_each_step() -> None:
    rig = Rig()
    rig.submit(submit("r", WHOLE, max_tokens=1))
    rig.submit(submit("lost", TWO))
    rig.run()
    rig.steps.peer_lost("mem://b", PeerLost("gone"))
    told = [(step.cause, step.text) for step in rig.steps.story.of("r")]
    batch = "batch 2 of a"
    assert told == [("r", "comes"), (batch, "length"), (batch, "gives its KV back")]
    told = [(step.cause, step.text) for step in rig.steps.story.of("lost#1")]
    assert told == [
        ("lost", "comes"),
        ("lost", "asks mem://b for room"),
        ("batch 1 of a", f"goes on at mem://b, block {TWO[1].start}"),
        ("loss of mem://b", "gives its KV back"),
        ("loss of mem://b", "fails: peer_lost"),
    ]


def test_a_stage_message_names_what_made_its_sender_say_it() -> None:
    """So the story of a later stage goes on where the leader's begins."""
    rig = Rig()
    admit = Admit(LATE, 1, "x#1", 3, 9)
    header, _ = activations.encode(admit, None, "call-7")
    rig.steps.received("mem://g", memoryview(header), memoryview(b""))
    ((_, sent, _),) = rig.sent
    answer, _, cause = activations.decode(memoryview(sent), memoryview(b""))
    assert (answer, cause) == (Admitted(1, "x#1"), "call-7")
    told = [(step.cause, step.text) for step in rig.steps.story.of("x")]
    assert told == [("call-7", "has room kept for it")]
