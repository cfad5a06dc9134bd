"""Tokens that are proposed by speculation, and accepted or not."""

from typing import Any

import pytest

from services.node.core.batching import Batcher
from services.node.core.microbatches import Emit, Failed, Part, Sampled, Send
from services.node.core.rows import Draw, Row
from services.node.core.speculation import STEP_POSITIONS
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Logprobs, Sampling, Token
from tests.support.submits import TWO, WHOLE, submit
from tests.unit.node.batching.builders import (
    FROM_C,
    FULL,
    FakeKv,
    Named,
    Work,
    batcher,
    come,
    forward,
    one,
    queue,
    take,
)

LOOP = (1, 2, 3, 1, 2)
"""3 follows, and then all again."""


def looping(
    *names: str, path: tuple[Stage, ...] = WHOLE, kv: FakeKv | None = None, **options: Any
) -> Batcher:
    """A scheduler that speculates, and requests whose first token was drawn: 3."""
    core = batcher(step_tokens=100, speculation=15, kv=kv)
    queue(core, *(submit(name, path, prompt=LOOP, **options) for name in names))
    (part,) = take(core)
    land(core, part, *[(3,)] * len(names))
    return core


def land(core: Batcher, part: Part, *drawn: tuple[int, ...]) -> list[Token]:
    """What goes out of these tokens."""
    if len(part.path.stages) > 1:
        core.ran(part, [()] * len(drawn), Named("hidden"))
        pairs = tuple(zip(part.keys, drawn, strict=True))
        commands = core.received(Sampled(part.batch, pairs))
    else:
        commands = core.ran(part, list(drawn), None)
    return [c.what for c in commands if isinstance(c, Emit) and isinstance(c.what, Token)]


def proposals(parts: Work) -> list[tuple[int, ...]]:
    return [row.draw.proposed for part in parts for row in part.rows if row.draw]


@pytest.mark.parametrize("path", [WHOLE, TWO], ids=["whole", "stages"])
def test_a_decode_row_goes_on_with_what_followed_before(path: tuple[Stage, ...]) -> None:
    core = looping("r", path=path)
    ((row,),) = [part.rows for part in take(core)]
    assert (row.position, row.count, row.tokens) == (5, 4, (3, 1, 2, 3))
    assert row.draw is not None
    assert (row.draw.index, row.draw.proposed) == (1, (1, 2, 3))


@pytest.mark.parametrize(
    ("drawn", "then"),
    [((1, 2, 3, 9), (9, (9,))), ((1, 2, 9), (8, (9,))), ((9,), (6, (9,)))],
    ids=["all", "two", "none"],
)
@pytest.mark.parametrize("path", [WHOLE, TWO], ids=["whole", "stages"])
def test_it_goes_on_after_what_was_accepted(
    path: tuple[Stage, ...], drawn: tuple[int, ...], then: tuple[int, tuple[int, ...]]
) -> None:
    core = looping("r", path=path)
    (part,) = take(core)
    said = land(core, part, drawn)
    assert [(token.index, token.token) for token in said] == list(enumerate(drawn, 1))
    ((row,),) = [part.rows for part in take(core)]
    assert (row.position, row.tokens) == then
    assert row.draw is not None
    assert row.draw.index == 1 + len(drawn)
    assert (core.tokens_proposed, core.tokens_accepted) == (3, len(drawn) - 1)


def test_nothing_is_proposed_past_the_last_token() -> None:
    core = looping("r", max_tokens=4)
    (part,) = take(core)
    assert proposals((part,)) == [(1, 2)]
    assert part.rows[0].position + part.rows[0].count == part.rows[0].limit
    said = land(core, part, (1, 2, 3))
    assert [token.finish for token in said] == ["", "", "length"]
    assert core.running == 0


def test_nothing_is_proposed_from_a_token_on_that_ends_the_request() -> None:
    core = looping("r", stop_ids=(2,))
    assert proposals(take(core)) == [(1,)]


def test_a_token_that_ends_the_request_is_its_last_in_an_accepted_run_too() -> None:
    core = looping("r", max_tokens=5)
    (part,) = take(core)
    core._leader.led.running["r#1"].submit = submit("r", WHOLE, prompt=LOOP, stop_ids=(2,))
    said = land(core, part, (1, 2, 3, 1))
    assert [(token.token, token.finish) for token in said] == [(1, ""), (2, "stop")]
    assert core.running == 0


def test_log_probabilities_of_accepted_tokens_go_out_each_with_its_own() -> None:
    core = looping("r")
    (part,) = take(core)
    found = tuple(Logprobs(-float(i), ()) for i in range(3))
    commands = core.ran(part, [(1, 2, 9)], None, {"r#1": found})
    said = [c.what for c in commands if isinstance(c, Emit)]
    assert [what.logprobs for what in said if isinstance(what, Token)] == list(found)


def test_what_a_step_has_room_for_is_shared_evenly() -> None:
    core = looping(*(f"r{i}" for i in range(5)))
    parts = take(core)
    assert [len(proposed) for proposed in proposals(parts)] == [3, 2, 2, 2, 2]
    assert sum(part.positions for part in parts) == STEP_POSITIONS


def test_a_large_step_has_no_proposals() -> None:
    core = looping("r")
    queue(core, one("long", WHOLE, STEP_POSITIONS - 1))
    parts = take(core)
    assert proposals(parts) == [(), ()]
    land(core, parts[0], (1,), (5,))
    assert proposals(take(core)) == [(2, 3, 1), ()]


def test_proposals_of_all_paths_together_fill_a_step() -> None:
    core = batcher(step_tokens=10, speculation=15)
    for name, path in (("r", WHOLE), ("s", TWO)):
        queue(core, submit(name, path, prompt=LOOP, max_tokens=40))
    for drawn in ((3,), (1, 2, 3, 1)):
        for part in take(core):
            land(core, part, drawn)
    assert [part.positions for part in take(core)] == [8, 2]


def test_nothing_is_proposed_for_want_of_kv() -> None:
    kv = FakeKv(kv_capacity=64)
    core = looping("r", kv=kv, max_tokens=40)
    kv.kv_used = 50
    (part,) = take(core)
    assert proposals((part,)) == [()]
    kv.kv_used = 16
    land(core, part, (1,))
    assert proposals(take(core)) == [(2, 3, 1)]


@pytest.mark.parametrize("drawn", [(2, 2), (1, 2, 3, 1, 2), (1, 3, 3)])
def test_tokens_that_were_not_proposed_cannot_be_accepted(drawn: tuple[int, ...]) -> None:
    core = looping("r", path=TWO)
    (part,) = take(core)
    core.ran(part, [()], Named("hidden"))
    commands = core.received(Sampled(part.batch, ((part.keys[0], drawn),)))
    assert [
        c.what.code for c in commands if isinstance(c, Emit) and isinstance(c.what, AttemptFailed)
    ] == ["protocol"]
    assert core.running == 0


def test_a_preempted_sequence_still_knows_what_followed() -> None:
    core = looping("old", "r")
    (part,) = take(core)
    core.no_room(part, FULL)
    land(core, core.live(part), (1,))
    (part,) = take(core)
    assert [row.sequence for row in part.rows] == ["r#1~1", "old#1"]
    land(core, part, (1,), (2,))
    assert (2, 3, 1) in proposals(take(core))


def test_a_followed_sequence_goes_on_at_any_of_its_proposed_positions() -> None:
    def proposing(position: int) -> Row:
        draw = Draw(0, Sampling(), proposed=(7, 8))
        return Row("x#1", position, 3, 30, (), draw)

    for accepted in range(3):
        core = batcher()
        come(core, forward(FROM_C, proposing(0)))
        core.take()
        assert come(core, forward(FROM_C, proposing(1 + accepted), batch=2)) == []
    for wrong in (0, 4):
        core = batcher()
        come(core, forward(FROM_C, proposing(0)))
        core.take()
        (_, told) = come(core, forward(FROM_C, proposing(wrong), batch=2))
        assert isinstance(told, Send)
        assert isinstance(told.message, Failed)
