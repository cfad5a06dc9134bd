from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.node.core.microbatches import (
    Admit,
    Admitted,
    Failed,
    Forward,
    Free,
    KvHere,
    Path,
    Pull,
    Sampled,
    StageMessage,
)
from services.node.core.rows import Context, Draw, Row, Score
from services.node.execution import activations
from shared.errors import ProtocolViolation
from shared.ids import ModelId
from shared.messages.serving import LogitRules, Logprobs, Pooling, Sampling
from tests.support.malformed import well_framed
from tests.support.submits import THREE

ROWS = (
    Row("r1#1", 0, 3, 20),
    Row("r2#4", 7, 1, 9, draw=Draw(2, Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=8))),
)
FORWARD = Forward(Path(ModelId("m"), THREE), 1, 17, ROWS)
HIDDEN = torch.arange(4 * 6, dtype=torch.float32).view(4, 6) / 7


def over_the_wire(
    message: StageMessage, hidden: torch.Tensor | None
) -> tuple[StageMessage, torch.Tensor | None]:
    header, payload = activations.encode(message, hidden)
    decoded = activations.decode(memoryview(header), memoryview(bytearray(b"".join(payload))))
    return decoded[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hidden_states_arrive_as_they_were(dtype: torch.dtype) -> None:
    hidden = HIDDEN.to(dtype)
    message, arrived = over_the_wire(FORWARD, hidden)
    assert message == FORWARD
    assert arrived is not None
    assert arrived.dtype == dtype
    assert torch.equal(arrived, hidden)


def test_a_prompt_for_a_later_stage_is_refused() -> None:
    for changes in ({"tokens": (1, 2, 3)}, {"image": b"pixels"}):
        wrong = msgspec.structs.replace(FORWARD, rows=(replace(ROWS[0], **changes), ROWS[1]))
        with pytest.raises(ProtocolViolation, match="a prompt for a later stage"):
            over_the_wire(wrong, HIDDEN)


def test_nothing_is_copied_on_the_cpu() -> None:
    whole = HIDDEN.clone()
    header, payload = activations.encode(FORWARD, whole[:4])
    buffer = payload[0]
    assert isinstance(buffer, memoryview)
    _, arrived, _ = activations.decode(memoryview(header), buffer)
    assert arrived is not None
    assert arrived.data_ptr() == whole.data_ptr()


def test_a_slice_or_a_transposed_tensor_is_sent_right() -> None:
    turned = HIDDEN.t().contiguous().t()
    _, arrived = over_the_wire(FORWARD, turned)
    assert arrived is not None
    assert torch.equal(arrived, HIDDEN)
    alone = msgspec.structs.replace(FORWARD, rows=ROWS[1:])
    _, arrived = over_the_wire(alone, HIDDEN[2:3])
    assert arrived is not None
    assert torch.equal(arrived, HIDDEN[2:3])


def test_a_payload_that_cannot_be_written_to_is_copied() -> None:
    header, payload = activations.encode(FORWARD, HIDDEN)
    _, arrived, _ = activations.decode(memoryview(header), memoryview(bytes(payload[0])))
    assert arrived is not None
    assert torch.equal(arrived, HIDDEN)


@pytest.mark.parametrize(
    "message",
    [
        Admit(Path(ModelId("m"), THREE), 2, "r1#1", 7, 300),
        Admit(Path(ModelId("m"), THREE), 1, "r1#1", 7, 300, pulls=True),
        Admitted(2, "r1#1"),
        Admitted(1, "r1#1", takes_cuts=True),
        Pull("tcp://a:1", 2048),
        KvHere("r1#2", 1, "kv/1", "form", b"digest", 3, 6),
        Sampled(5, (("r1#1", ()), ("r2#4", (99, 7)))),
        Sampled(5, (("r1#1", ()),), vectors={"r1#1": b"1234"}),
        Sampled(5, (("r2#4", (99,)),), {"r2#4": (Logprobs(-0.5, ((99, -0.5), (3, -1.25))),)}),
        Free(("r1#1", "r2#4")),
        Failed(("r1#1",), "capacity", "no room"),
    ],
)
def test_other_messages_have_no_payload(message: StageMessage) -> None:
    assert over_the_wire(message, None) == (message, None)
    header, _ = activations.encode(message, None)
    with pytest.raises(ProtocolViolation, match="3 bytes"):
        activations.decode(memoryview(header), memoryview(b"abc"))


def changed(**fields: object) -> Forward:
    return msgspec.structs.replace(FORWARD, **fields)


SO_FAR = (7, 8, 9, 7, 4, 4, 4, 4)


def with_context(*, prompt_tokens: int = 6, tokens: tuple[int, ...] = SO_FAR) -> Forward:
    """A message that asks for token 2 of its request."""
    context = Context(tokens, prompt_tokens, (1,), LogitRules(presence_penalty=0.5))
    draw = Draw(2, Sampling(), context)
    return changed(rows=(ROWS[0], replace(ROWS[1], draw=draw)))


def test_rules_arrive_with_the_tokens_so_far() -> None:
    assert over_the_wire(with_context(), HIDDEN)[0] == with_context()


def with_row(*, position: int = 0, count: int = 3) -> Forward:
    return changed(rows=(replace(ROWS[0], position=position, count=count), ROWS[1]))


PROPOSING = Draw(1, Sampling(), proposed=(7,))


def test_how_a_row_is_pooled_arrives() -> None:
    message = changed(rows=(replace(ROWS[0], pooling=Pooling.MEAN), ROWS[1]))
    assert over_the_wire(message, HIDDEN)[0] == message


def test_proposed_tokens_arrive() -> None:
    rows = (replace(ROWS[0], draw=PROPOSING), ROWS[1])
    assert over_the_wire(changed(rows=rows), HIDDEN)[0] == changed(rows=rows)


def test_what_is_to_be_scored_arrives() -> None:
    rows = (replace(ROWS[0], score=Score(1, (7, 8), 5)), ROWS[1])
    assert over_the_wire(changed(rows=rows), HIDDEN)[0] == changed(rows=rows)


PATH = FORWARD.path
BACKWARDS = msgspec.structs.replace(PATH, stages=PATH.stages[::-1])
TWICE = msgspec.structs.replace(
    PATH,
    stages=(
        PATH.stages[0],
        PATH.stages[1],
        msgspec.structs.replace(PATH.stages[2], address=PATH.stages[0].address),
    ),
)


def with_score(score: Score) -> Forward:
    return changed(rows=(replace(ROWS[0], score=score), ROWS[1]))


def with_draw(**changes: Any) -> Forward:
    assert ROWS[1].draw is not None
    return changed(rows=(ROWS[0], replace(ROWS[1], draw=replace(ROWS[1].draw, **changes))))


def with_rules(rules: LogitRules) -> Forward:
    return with_draw(context=Context(SO_FAR, 6, (1,), rules))


GAP = msgspec.structs.replace(PATH, stages=(PATH.stages[0], PATH.stages[2]))


@pytest.mark.parametrize(
    ("message", "hidden"),
    [
        (FORWARD, HIDDEN[:3]),
        (FORWARD, torch.cat([HIDDEN, HIDDEN])),
        (FORWARD, HIDDEN[:, :0]),
        (FORWARD, None),
        (changed(stage=0), HIDDEN),
        (changed(stage=3), HIDDEN),
        (changed(stage=-1), HIDDEN),
        (changed(path=BACKWARDS), HIDDEN),
        (changed(path=GAP), HIDDEN),
        (changed(path=Path(ModelId("m"), ())), HIDDEN),
        (changed(rows=()), HIDDEN[:0]),
        (changed(rows=(ROWS[0], ROWS[0])), torch.cat([HIDDEN, HIDDEN])[:6]),
        (changed(rows=(replace(ROWS[0], tokens=(1, 2, 3)), ROWS[1])), HIDDEN),
        (with_context(prompt_tokens=3), HIDDEN),
        (with_context(prompt_tokens=6, tokens=SO_FAR[1:]), HIDDEN),
        (with_context(tokens=(*SO_FAR[:-1], -1)), HIDDEN),
        (changed(path=TWICE), HIDDEN),
        (changed(batch=-1), HIDDEN),
        (changed(rows=(replace(ROWS[0], limit=2**31), ROWS[1])), HIDDEN),
        (changed(rows=(replace(ROWS[0], sequence=""), ROWS[1])), HIDDEN),
        (with_score(Score(2, (7, 8), 0)), HIDDEN),
        (with_score(Score(0, (7,), -1)), HIDDEN),
        (with_score(Score(0, (2**31,), 0)), HIDDEN),
        (with_score(Score(0, (), 0)), HIDDEN),
        (with_draw(index=8), HIDDEN),
        (with_draw(index=-1), HIDDEN),
        (with_draw(sampling=Sampling(temperature=float("nan"))), HIDDEN),
        (with_draw(sampling=Sampling(top_p=1.5)), HIDDEN),
        (with_draw(sampling=Sampling(min_p=-0.5)), HIDDEN),
        (with_draw(sampling=Sampling(top_k=-1)), HIDDEN),
        (with_draw(sampling=Sampling(logprobs=-1)), HIDDEN),
        (with_rules(LogitRules(repetition_penalty=0.0)), HIDDEN),
        (with_rules(LogitRules(presence_penalty=float("inf"))), HIDDEN),
        (with_rules(LogitRules(logit_bias=((-1, 1.0),))), HIDDEN),
        (with_rules(LogitRules(min_tokens=-1)), HIDDEN),
        (changed(rows=(ROWS[0], replace(ROWS[1], draw=PROPOSING))), HIDDEN),
        (changed(rows=(ROWS[0], replace(ROWS[1], pooling=Pooling.LAST))), HIDDEN),
        (with_row(count=0), HIDDEN[:1]),
        (with_row(count=-3), HIDDEN),
        (with_row(position=-1), HIDDEN),
        (with_row(position=18), HIDDEN),
    ],
)
def test_what_does_not_fit_is_refused(message: Forward, hidden: torch.Tensor | None) -> None:
    with pytest.raises(ProtocolViolation):
        over_the_wire(message, hidden)


@pytest.mark.parametrize(
    "message",
    [
        Admit(Path(ModelId("m"), THREE), 0, "r1#1", 7, 300),
        Admit(Path(ModelId("m"), THREE), 3, "r1#1", 7, 300),
        Admit(Path(ModelId("m"), THREE), 1, "", 7, 300),
        Admit(Path(ModelId("m"), THREE), 1, "r1#1", 0, 300),
        Admit(Path(ModelId("m"), THREE), 1, "r1#1", 7, 6),
        Admit(Path(ModelId("m"), THREE), 1, "r1#1", 7, 2**31),
        Admitted(0, "r1#1"),
        Pull("", 2048),
        Pull("tcp://a:1", 0),
        KvHere("r1#2", 1, "kv/1", "form", b"digest", 6, 3),
        Admitted(1, ""),
        Sampled(-1, (("r1#1", ()),)),
        Sampled(5, (("r1#1", ()), ("r1#1", ()))),
        Sampled(5, (("r1#1", (-1,)),)),
        Sampled(5, (("r1#1", (2**31,)),)),
        Sampled(5, (("r1#1", ()),), {"r2#4": ()}),
        Sampled(5, (("r1#1", ()),), vectors={"r2#4": b"1234"}),
        Sampled(5, (("r1#1", (1,)),), {"r1#1": (Logprobs(float("nan"), ()),)}),
        Sampled(5, (("r1#1", (1,)),), {"r1#1": (Logprobs(-1.0, ((-1, -1.0),)),)}),
        Free(("",)),
        Free(("r1#1", "r1#1")),
        Failed(("r1#1", "r1#1"), "capacity", "no room"),
    ],
)
def test_an_answer_that_cannot_be_meant_is_refused(message: StageMessage) -> None:
    with pytest.raises(ProtocolViolation):
        over_the_wire(message, None)


KILLER = with_draw(index=-1, context=Context((), 1, (), LogitRules()))
"""min() of no tokens was a ValueError, which ended the node."""


ANYTHING = tuple(well_framed(kind) for kind in (Admit, Admitted, Forward, Sampled, Free, Failed))


@given(st.one_of(*ANYTHING), st.integers(0, 3))
@example(KILLER, 4)
def test_whatever_is_well_framed_is_decoded_or_refused(message: StageMessage, width: int) -> None:
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
    try:
        decoded, _, _ = activations.decode(
            memoryview(msgspec.msgpack.encode(header)), memoryview(payload)
        )
    except ProtocolViolation:
        return
    assert decoded == message


@pytest.mark.parametrize("version", range(activations.OLDEST - 1, activations.VERSION + 3))
def test_a_node_of_the_next_version_is_understood_and_no_later_one(version: int) -> None:
    header = {"v": version, "message": Free(("r1#1",)), "later": 1}
    data = memoryview(msgspec.msgpack.encode(header))
    if activations.OLDEST <= version <= activations.VERSION + 1:
        assert activations.decode(data, memoryview(b""))[0] == Free(("r1#1",))
    else:
        with pytest.raises(ProtocolViolation, match=f"version {version}.*one release at a time"):
            activations.decode(data, memoryview(b""))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        b"\x81\xa4\xff\xff\xff\xff\x01",
        msgspec.msgpack.encode({"v": 2}),
        msgspec.msgpack.encode({"v": 2, "message": {"kind": "unknown"}}),
        msgspec.msgpack.encode({"v": 2, "message": {"kind": "free", "sequences": [1]}}),
        msgspec.msgpack.encode({"v": 9, "message": {"kind": "free", "sequences": ["a#1"]}}),
        msgspec.msgpack.encode({"v": 2, "message": FORWARD, "dtype": "int8", "hidden_size": 24}),
        msgspec.msgpack.encode({"v": 2, "message": FORWARD, "dtype": "float32", "hidden_size": -6}),
    ],
)
def test_a_malformed_header_is_refused(header: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        activations.decode(memoryview(header), memoryview(bytearray(96)))
