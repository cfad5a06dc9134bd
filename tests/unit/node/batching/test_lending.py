"""What a node lends of a sequence's KV, and when: pieces of what has run, each once, and in the end
all of it."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.core.batching import Batcher
from services.node.core.handover import covers, secret_of
from services.node.core.kv import PAGE, movable
from services.node.core.lending import Lendings
from services.node.core.microbatches import (
    Admit,
    Command,
    Forward,
    Handled,
    KvAsk,
    KvHere,
    Lend,
    Send,
)
from services.node.core.rows import Draw, Row
from shared.messages.serving import Cancel, Sampling, Submit
from tests.support.submits import BLOCKS, MODEL, WHOLE, submit
from tests.unit.node.batching.builders import FROM_C, FakeKv, batcher, queue, run, take

PROMPT = tuple(range(4 * PAGE))
END = movable(len(PROMPT))
NEW = "mem://b"


def ask_for(message: Submit, *, end: int = END) -> KvAsk:
    return KvAsk("r#1", secret_of(message), 0, 0, BLOCKS, 0, end, NEW, "r#2", any_cut=True)


def pieces(commands: Iterable[Command]) -> list[tuple[int, int, int, int]]:
    asks = [command.ask for command in commands if isinstance(command, Lend)]
    return [(ask.start, ask.stop, ask.first, ask.end) for ask in asks]


def refusals(commands: Iterable[Command]) -> list[KvHere]:
    sent = [command.message for command in commands if isinstance(command, Send)]
    return [message for message in sent if isinstance(message, KvHere) and not message.region]


def prefilling(step_tokens: int) -> tuple[Batcher, Submit]:
    core, message = batcher(step_tokens=step_tokens), submit("r", WHOLE, prompt=PROMPT)
    queue(core, message)
    return core, message


def test_kv_is_lent_block_by_block_while_the_prompt_runs() -> None:
    core, message = prefilling(64)
    assert core.received(ask_for(message)) == []
    parts = take(core)
    assert core.lends(parts)
    lent = [pieces(core.reached(parts, block)) for block in (0, 2, 2, 5, BLOCKS)]
    assert lent == [[], [(0, 2, 0, END)], [], [(2, 5, 0, END)], [(5, BLOCKS, 0, END)]]
    assert not core.lends(parts)


def test_of_a_prompt_of_several_steps_each_is_lent_as_it_runs() -> None:
    core, message = prefilling(PAGE + 3)
    core.received(ask_for(message))
    lent: list[tuple[int, int, int, int]] = []
    for _ in range(-(-len(PROMPT) // (PAGE + 3))):
        parts = take(core)
        lent += pieces([*core.reached(parts, 3), *core.reached(parts, BLOCKS)])
        run(core, parts, token=7)
    assert covers(lent, range(BLOCKS), 0, END)
    assert [piece[:2] for piece in lent] == [(0, 3), (3, BLOCKS)] * (len(lent) // 2)


def test_who_asks_late_gets_what_has_run_at_once() -> None:
    core, message = prefilling(2 * PAGE)
    run(core, take(core))
    assert pieces(core.received(ask_for(message))) == [(0, BLOCKS, 0, 2 * PAGE)]
    parts = take(core)
    assert pieces(core.reached(parts, BLOCKS)) == [(0, BLOCKS, 2 * PAGE, END)]


def test_when_the_sequence_ends_the_rest_is_refused() -> None:
    core, message = prefilling(64)
    core.received(ask_for(message))
    parts = take(core)
    core.reached(parts, 2)
    said = core.cancel(Cancel(request=message.request, attempt=1))
    assert refusals(said) == [KvHere("r#2", 0)]
    assert core.reached(parts, BLOCKS) == []


def test_who_asks_for_more_gets_what_has_run_since_page_or_not() -> None:
    core, message = prefilling(64)
    run(core, take(core), token=7)
    more = msgspec.structs.replace(ask_for(message, end=999), first=END, more=True)
    assert pieces(core.received(more)) == [(0, BLOCKS, END, len(PROMPT))]
    parts = take(core)
    assert pieces(core.reached(parts, BLOCKS)) == []
    run(core, parts, token=8)
    more = msgspec.structs.replace(more, first=len(PROMPT))
    (lend,) = core.received(more)
    assert pieces([lend]) == [(0, BLOCKS, len(PROMPT), len(PROMPT) + 1)]
    run(core, take(core), token=9)
    assert isinstance(lend, Lend)
    (said,) = core.lent(lend, KvHere("r#2", 0, "region"))
    assert isinstance(said, Send)
    assert said.message == KvHere("r#2", 0, "region", ran=len(PROMPT) + 2)


def test_if_nothing_has_run_since_nothing_more_is_lent() -> None:
    core, message = prefilling(64)
    run(core, take(core), token=7)
    more = msgspec.structs.replace(ask_for(message, end=999), first=len(PROMPT), more=True)
    assert refusals(core.received(more)) == [KvHere("r#2", 0)]


@pytest.mark.parametrize("proposed", [0, 2])
def test_a_later_stage_lends_what_has_run_there_but_for_what_was_proposed(proposed: int) -> None:
    core = batcher(step_tokens=64)
    message = submit("r", FROM_C.stages, prompt=PROMPT)
    ask = msgspec.structs.replace(ask_for(message, end=999), first=END, stage=1, more=True)
    admit = Admit(FROM_C, 1, "r#1", len(PROMPT), 200, secret=secret_of(message))
    core.received(admit)
    core.received(Forward(FROM_C, 1, 1, (Row("r#1", 0, len(PROMPT), 200),)))
    assert refusals(core.received(ask)) == [KvHere("r#2", 1)]
    run(core, take(core))
    assert pieces(core.received(ask)) == [(2, BLOCKS, END, len(PROMPT))]
    draw = Draw(1, Sampling(), proposed=(5,) * proposed)
    row = Row("r#1", len(PROMPT), 1 + proposed, 200, draw=draw)
    core.received(Forward(FROM_C, 1, 2, (row,)))
    run(core, take(core))
    assert pieces(core.received(ask)) == [(2, BLOCKS, END, len(PROMPT) + 1)]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("asked", ["stranger", "unknown"])
def test_others_get_nothing(asked: str, more: bool) -> None:
    core, message = prefilling(64)
    run(core, take(core))
    ask = msgspec.structs.replace(ask_for(message), more=more)
    if asked == "stranger":
        ask = msgspec.structs.replace(ask, secret=b"wrong")
    else:
        ask = msgspec.structs.replace(ask, sequence="s#1")
    assert refusals(core.received(ask)) == [KvHere("r#2", 0)]
    assert not core.lends(take(core))


class Shaped(FakeKv):
    """Keeps KV in some blocks only, and so much of it."""

    def __init__(self, kept: frozenset[int], nbytes: int) -> None:
        super().__init__()
        self.kept, self.nbytes = kept, nbytes

    def keeps(self, model_id: object, start: int, stop: int) -> bool:
        return bool(self.kept.intersection(range(start, stop)))

    def position_bytes(self, model_id: object) -> int:
        return self.nbytes


@given(data=st.data())
def test_every_piece_has_run_and_together_they_are_all(data: st.DataObject) -> None:
    kept = data.draw(st.frozensets(st.integers(0, BLOCKS - 1), min_size=1))
    kv = Shaped(kept, data.draw(st.sampled_from([1, 1 << 16, 1 << 22, 1 << 26])))
    total = data.draw(st.integers(1, 12)) * PAGE
    first = data.draw(st.integers(0, total // PAGE - 1)) * PAGE
    message = submit("r", WHOLE, prompt=PROMPT)
    ask = msgspec.structs.replace(ask_for(message, end=total), first=first)
    lendings, ran, lent = Lendings(kv, Handled()), 0, []
    asks_at = data.draw(st.integers(0, 5))
    step = 0
    while ran < total or step <= asks_at:
        count = data.draw(st.integers(1, 3 * PAGE))
        at = 0
        if step == asks_at:
            lent += pieces(lendings.begin(ask, MODEL, ran))
            assert all(end <= ran for *_, end in lent)
        while at < BLOCKS:
            at = data.draw(st.integers(at + 1, BLOCKS))
            new = pieces(lendings.reached(Row("r#1", ran, count, 999), at))
            assert all(end <= ran or (stop <= at and end <= ran + count) for _, stop, _, end in new)
            lent += new
        ran, step = ran + count, step + 1
    assert covers(lent, kept, first, total)
    assert not lendings.wants(("r#1",))
