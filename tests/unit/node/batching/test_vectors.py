"""Requests for the vectors of their prompts."""

from typing import Any

import msgspec
import pytest

from services.node.core.batching import Batcher
from services.node.core.microbatches import Command, Emit, Forward, Path, Sampled, Send
from services.node.core.rows import Row
from services.node.core.sequences import VECTORS
from shared.errors import BadInput
from shared.ids import RequestId
from shared.messages.serving import AttemptFailed, LogitRules, Pooling, Sampling, Submit, Token
from tests.support.submits import MODEL, THREE, TWO, WHOLE, submit
from tests.unit.node.batching.builders import (
    FakeKv,
    Named,
    Work,
    batcher,
    come,
    forward,
    one,
    queue,
    rows,
    take,
)

PROMPT = tuple(range(10, 16))
MEAN = submit("r", WHOLE, prompt=PROMPT, max_tokens=1, pooling=Pooling.MEAN)
CLS = msgspec.structs.replace(MEAN, pooling=Pooling.CLS)
LAST = msgspec.structs.replace(MEAN, pooling=Pooling.LAST)


def land(core: Batcher, work: Work, vector: bytes = b"1234") -> list[Command]:
    """Has the engine give the vectors that it should."""
    (part,) = work
    found = {row.sequence: vector for row in part.rows if row.gives_vector}
    sampled = [(1,) if row.draw else () for row in part.rows]
    return core.ran(part, sampled, None, None, found)


def said(commands: list[Command]) -> list[Any]:
    return [command.what for command in commands if isinstance(command, Emit)]


def pooled(work: Work) -> list[Pooling | None]:
    return [row.pooling for part in work for row in part.rows]


@pytest.mark.parametrize(("asked", "first"), [(MEAN, Pooling.MEAN), (LAST, None)])
def test_a_request_ends_with_the_vector_of_its_prompt(asked: Submit, first: Pooling | None) -> None:
    """All rows are averaged, and only the last one has the last state."""
    core = batcher(step_tokens=4, speculation=3)
    queue(core, asked)
    work = take(core)
    assert (pooled(work), [row.draw for row in work[0].rows]) == ([first], [None])
    assert said(land(core, work)) == []
    work = take(core)
    assert rows(work) == [("r#1", 4, 2)]
    assert (pooled(work), [row.draw for row in work[0].rows]) == ([asked.pooling], [None])
    assert said(land(core, work)) == [Token(RequestId("r"), 1, 0, 0, "length", vector=b"1234")]
    assert core.running == 0
    core.validate()


def test_only_the_beginning_of_a_prompt_that_is_not_averaged_is_looked_for_in_the_cache() -> None:
    kv = FakeKv()
    core = batcher(kv=kv)
    queue(core, MEAN, msgspec.structs.replace(LAST, request=RequestId("s")))
    take(core)
    assert kv.asked == {"r#1": (), "s#1": PROMPT}


def test_a_text_of_an_encoder_goes_whole_and_keeps_nothing() -> None:
    kv = FakeKv(kv_capacity=0, without={MODEL})
    core = batcher(step_tokens=4, kv=kv)
    queue(core, CLS, msgspec.structs.replace(CLS, request=RequestId("s")))
    for name in ("r#1", "s#1"):
        work = take(core)
        assert (rows(work), pooled(work)) == ([(name, 0, 6)], [Pooling.CLS])
        assert said(land(core, work))[0].vector == b"1234"
    assert kv.asked == {"r#1": (), "s#1": ()}
    assert core.running == 0


def test_a_row_without_its_vector_ends_its_request() -> None:
    """As from a stage of the release before."""
    for path in (WHOLE, TWO):
        core = batcher(step_tokens=6)
        queue(core, msgspec.structs.replace(MEAN, stages=path))
        (part,) = take(core)
        commands = core.ran(part, [()], Named("hidden"))
        if path is TWO:
            commands = core.received(Sampled(part.batch, (("r#1", ()),)))
        (failed,) = said(commands)
        assert isinstance(failed, AttemptFailed)
        assert failed.code == "protocol"


def test_what_is_to_be_pooled_goes_to_the_stage_with_the_head() -> None:
    core = batcher("b")
    row = Row("r#1", 0, 2, 9, pooling=Pooling.MEAN)
    come(core, forward(Path(MODEL, THREE), row), Named("hidden"))
    (part,) = take(core)
    (sent,) = core.ran(part, [()], Named("hidden"))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Forward)
    assert sent.message.rows == (row,)


def test_the_last_stage_sends_the_vector_to_the_leader() -> None:
    core = batcher("c")
    row = Row("r#1", 0, 2, 2, pooling=Pooling.LAST)
    path = Path(MODEL, THREE)
    come(core, Forward(path, 2, 1, (row,)), Named("hidden"))
    (sent,) = land(core, take(core))
    assert isinstance(sent, Send)
    assert sent.message == Sampled(1, (("r#1", ()),), vectors={"r#1": b"1234"})
    assert sent.address == path.leader


def test_a_message_between_stages_has_no_more_vectors_than_it_takes() -> None:
    core = batcher(slots=100, step_tokens=1000, kv=FakeKv(10_000))
    names = [f"r{i}" for i in range(2 * VECTORS + 5)]
    for name in names:
        queue(core, submit(name, TWO, prompt=PROMPT, max_tokens=1, pooling=Pooling.LAST))
    queue(core, one("plain", TWO))
    (first,) = take(core)
    assert sum(row.gives_vector for row in first.rows) == VECTORS


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 2},
        {"image": b"pixels"},
        {"stop_ids": (3,)},
        {"rules": LogitRules(presence_penalty=1)},
        {"score_from": 1, "sampling": Sampling(logprobs=1)},
    ],
)
def test_a_vector_has_no_settings_of_tokens(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        queue(batcher(), msgspec.structs.replace(MEAN, **changes))
