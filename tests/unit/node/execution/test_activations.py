from dataclasses import replace

import msgspec
import pytest
import torch

from services.node.core.microbatches import Failed, Forward, Free, Path, Sampled, StageMessage
from services.node.core.rows import Context, Draw, Row, Score
from services.node.execution import activations
from shared.errors import ProtocolViolation
from shared.ids import ModelId
from shared.messages.serving import LogitRules, Logprobs, Sampling
from tests.support.worker_cluster import THREE

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
    return activations.decode(memoryview(header), memoryview(bytearray(b"".join(payload))))


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
    _, arrived = activations.decode(memoryview(header), buffer)
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
    _, arrived = activations.decode(memoryview(header), memoryview(bytes(payload[0])))
    assert arrived is not None
    assert torch.equal(arrived, HIDDEN)


@pytest.mark.parametrize(
    "message",
    [
        Sampled(5, (("r1#1", ()), ("r2#4", (99, 7)))),
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


def with_context(*, prompt_tokens: int = 2, tokens: tuple[int, ...] = (7, 8, 9, 7)) -> Forward:
    """For token 2 of its request."""
    context = Context(tokens, prompt_tokens, (1,), LogitRules(presence_penalty=0.5))
    draw = Draw(2, Sampling(), context)
    return changed(rows=(ROWS[0], replace(ROWS[1], draw=draw)))


def test_rules_arrive_with_the_tokens_so_far() -> None:
    assert over_the_wire(with_context(), HIDDEN)[0] == with_context()


def with_row(*, position: int = 0, count: int = 3) -> Forward:
    return changed(rows=(replace(ROWS[0], position=position, count=count), ROWS[1]))


PROPOSING = Draw(2, Sampling(), proposed=(7,))


def test_proposed_tokens_arrive() -> None:
    rows = (replace(ROWS[0], draw=PROPOSING), ROWS[1])
    assert over_the_wire(changed(rows=rows), HIDDEN)[0] == changed(rows=rows)


def test_what_is_to_be_scored_arrives() -> None:
    rows = (replace(ROWS[0], score=Score(1, (7, 8), 5)), ROWS[1])
    assert over_the_wire(changed(rows=rows), HIDDEN)[0] == changed(rows=rows)


PATH = FORWARD.path
BACKWARDS = msgspec.structs.replace(PATH, stages=PATH.stages[::-1])
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
        (with_context(prompt_tokens=0, tokens=(7, 8)), HIDDEN),
        (with_context(tokens=(7, 8, 9, -1)), HIDDEN),
        (changed(rows=(ROWS[0], replace(ROWS[1], draw=PROPOSING))), HIDDEN),
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
