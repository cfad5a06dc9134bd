"""Sweeps of parts with different blocks: transformers' tokens, each block once, whoever rides."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from services.node.core.kv import PAGE
from services.node.engine import kernels
from services.node.engine.base import (
    Bell,
    Context,
    Draw,
    PartResult,
    Row,
    RowsRefused,
    Score,
    StagePart,
    Sweep,
)
from services.node.engine.engine import TorchEngine
from services.node.engine.kernel_step import KernelStep
from services.node.engine.layer_step import LayerStep
from services.node.engine.linear import Form
from services.node.engine.processors import Logits, Processor
from services.node.engine.step import Step
from services.node.engine.weights import LayerUnit
from shared.errors import BadInput, CapacityExceeded, Conflict, NotFound
from shared.messages.serving import LogitRules, Sampling
from tests.unit.node.engine.models import MODEL, Model, part, row, run, run_all

LAST = 6
PROMPT = [7, 3, 90, 14, 15, 9, 2]


def untokened(rows: list[Row]) -> list[Row]:
    return [replace(one, tokens=()) for one in rows]


def hidden_before(model: Model, block: int, rows: list[Row]) -> torch.Tensor:
    """What an engine with the blocks before makes of the rows."""
    hidden = run(model.engine(0, block), part(rows, 0, block)).hidden
    assert hidden is not None
    return hidden


def from_block(model: Model, block: int, *rows: Row) -> StagePart:
    """Rows whose sequences start here, for blocks from `block` on."""
    hidden = hidden_before(model, block, list(rows))
    return part(untokened(list(rows)), block, LAST, hidden)


def finish(sweep: Sweep, count: int) -> dict[int, PartResult]:
    """Until `count` parts have got off."""
    left: dict[int, PartResult] = {}
    while len(left) < count:
        left |= sweep.advance()
    return left


@dataclass
class Stream:
    """A request on a path; the engine under test is one of its stages."""

    key: str
    before: int
    """Blocks of the stage before, 0 if there is none."""
    stop: int
    prompt: list[int]
    tokens: list[int]
    position: int = 0

    def next_row(self) -> Row:
        new = [*self.prompt, *self.tokens][self.position :]
        return row(self.key, self.position, new, draw=len(self.tokens))


def test_many_ranges_in_one_sweep_give_the_tokens_of_transformers(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of all streams is one sweep of the engine they share, and each layer runs once."""
    ran: list[LayerUnit] = []
    kind = KernelStep if kernels.load() else LayerStep
    run_layers: Any = kind.run

    def watched(
        self: Step,
        block: int,
        blocks: Iterable[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float,
        bell: Bell | None,
    ) -> int:
        given = [*blocks]
        count: int = run_layers(self, block, given, hidden, kv, for_s, bell)
        ran.extend(chain(*given[:count]))
        return count

    ranges = [(0, 6), (1, 6), (3, 6), (4, 6), (0, 2), (2, 5), (0, 6)]
    streams = [
        Stream(f"s{i}", start, stop, [(11 * i + j) % 96 for j in range(3 + 6 * i)], [])
        for i, (start, stop) in enumerate(ranges)
    ]
    shared, others = model.engine(), model.engine()
    for _ in range(6):
        rows = [stream.next_row() for stream in streams]
        parts = []
        for stream, one in zip(streams, rows, strict=True):
            hidden = None
            if stream.before:
                early = replace(one, sequence=f"{one.sequence} before")
                hidden = run(others, part([early], 0, stream.before)).hidden
                one = replace(one, tokens=())
            parts.append(part([one], stream.before, stream.stop, hidden))
        ran.clear()
        with monkeypatch.context() as patch:
            patch.setattr(kind, "run", watched)
            results = run_all(shared, parts)
        assert len(ran) == 4
        for stream, one, result in zip(streams, rows, results, strict=True):
            if stream.stop < LAST:
                late = replace(one, sequence=f"{one.sequence} after", tokens=())
                result = run(others, part([late], stream.stop, LAST, result.hidden))
            ((token,),) = result.sampled
            stream.tokens.append(token)
            stream.position += one.count
    for stream in streams:
        assert stream.tokens == model.expected_tokens(stream.prompt, 6, stream.tokens)


def test_parts_get_off_where_they_stop(model: Model) -> None:
    sweep = model.engine().begin(MODEL)
    early = sweep.join(part([row("early", 0, PROMPT)], 0, 2))
    late = sweep.join(from_block(model, 4, row("late", 0, PROMPT, draw=0)))
    assert [set(sweep.advance()), sweep.at] == [set(), 1]
    left = sweep.advance()
    assert [set(left), sweep.at] == [{early}, 2]
    expected = hidden_before(model, 2, [row("s", 0, PROMPT)])
    hidden = left[early].hidden
    assert [set(sweep.advance()), sweep.at] == [set(), 5]
    left |= sweep.advance()
    assert hidden is not None
    assert torch.equal(hidden, expected)
    assert list(*left[late].sampled) == model.expected_tokens(PROMPT, 1)
    assert (sweep.at, sweep.advance()) == (LAST, {})


def test_blocks_run_one_after_the_other_until_a_part_joins_or_leaves(model: Model) -> None:
    long_s = 600.0
    sweep = model.engine().begin(MODEL)
    early = sweep.join(part([row("early", 0, PROMPT)], 0, 2))
    whole = sweep.join(part([row("whole", 0, PROMPT, draw=0)], 0, LAST))
    late = sweep.join(from_block(model, 4, row("late", 0, PROMPT, draw=0)))
    assert [set(sweep.advance()), sweep.at] == [set(), 1]
    assert [set(sweep.advance(long_s)), sweep.at] == [{early}, 2]
    assert [set(sweep.advance(long_s)), sweep.at] == [set(), 4]
    left = sweep.advance(long_s)
    assert [set(left), sweep.at] == [{whole, late}, LAST]
    for number in (whole, late):
        assert list(*left[number].sampled) == model.expected_tokens(PROMPT, 1)


@pytest.mark.parametrize("form", ["packed", "stored"])
def test_blocks_run_one_after_the_other_while_nobody_waits(
    model: Model, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "cpu_weights", form)
    engine, bell = model.engine(), Bell()
    sweep = engine.begin(MODEL)
    sweep.join(part([row("whole", 0, PROMPT, draw=0)], 0, LAST))
    bell.ring()
    assert [set(sweep.advance(0.0, bell)), sweep.at] == [set(), 1]
    bell.quiet()
    (left,) = sweep.advance(0.0, bell).values()
    assert list(*left.sampled) == model.expected_tokens(PROMPT, 1)


def test_joining_on_the_way(model: Model) -> None:
    sweep = model.engine().begin(MODEL)
    first = sweep.join(part([row("first", 0, PROMPT, draw=0)], 0, LAST))
    sweep.advance()
    sweep.advance()
    with pytest.raises(BadInput, match="ahead"):
        sweep.join(from_block(model, 1, row("behind", 0, [1])))
    joined = sweep.join(from_block(model, 2, row("joined", 0, PROMPT[:5], draw=0)))
    later = sweep.join(from_block(model, 5, row("later", 0, PROMPT[:3], draw=0)))
    left = finish(sweep, 3)
    assert {number: list(*result.sampled) for number, result in left.items()} == {
        first: model.expected_tokens(PROMPT, 1),
        joined: model.expected_tokens(PROMPT[:5], 1),
        later: model.expected_tokens(PROMPT[:3], 1),
    }


def test_a_row_whose_draw_fails_leaves_the_others_their_tokens(model: Model) -> None:
    """Its penalties are for a token that the model does not have."""
    odd = Context((10**6,), 1, (), LogitRules(repetition_penalty=2.0))
    rows = [row(key, 0, PROMPT, draw=0) for key in ("one", "odd", "two")]
    rows[1] = replace(rows[1], draw=Draw(0, Sampling(), odd))
    result = run(model.engine(), part(rows, 0, LAST))
    (token,) = model.expected_tokens(PROMPT, 1)
    assert result.sampled == ((token,), (), (token,))
    assert list(result.failed) == ["odd"]


def test_a_draw_that_fails_after_accepted_tokens_fails_at_the_next_step(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would have if they had been drawn one by one."""
    apply, applied = Processor.apply, 0

    def breaks(self: Processor, logits: Logits) -> None:
        nonlocal applied
        applied += 1
        if applied > 2:
            raise BadInput("no more")
        apply(self, logits)

    monkeypatch.setattr(Processor, "apply", breaks)
    engine, expected = model.engine(), model.expected_tokens(PROMPT, 3)
    rules = Context(tuple(PROMPT), len(PROMPT), (), LogitRules(presence_penalty=1e-9))
    draw = Draw(0, Sampling(), rules, tuple(expected))
    first = replace(row("s", 0, [*PROMPT, *expected]), draw=draw)
    result = run(engine, part([first], 0, LAST))
    assert (result.sampled, result.failed) == ((tuple(expected[:2]),), {})
    result = run(engine, part([row("s", len(PROMPT) + 1, expected[1:2], draw=2)], 0, LAST))
    assert result.sampled == ((),)
    assert list(result.failed) == ["s"]


def scored(key: str, first: int, *tokens: int) -> Row:
    return replace(row(key, 0, PROMPT), score=Score(first, tokens, 0))


def test_a_row_that_cannot_be_scored_leaves_the_others_theirs(model: Model) -> None:
    rows = [scored(key, 0, *PROMPT[1:]) for key in ("one", "odd", "two")]
    hidden = hidden_before(model, 5, rows).clone()
    hidden[len(PROMPT) + 3] = torch.nan
    result = run(model.engine(5), part(untokened(rows), 5, LAST, hidden))
    assert result.sampled == ((), (), ())
    assert list(result.failed) == ["odd"]
    expected = model.expected_logits(PROMPT).log_softmax(-1)
    for key in ("one", "two"):
        found = [logprobs.drawn for logprobs in result.logprobs[key]]
        wanted = [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])]
        assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("token", [-1, 96])
def test_a_token_that_the_model_does_not_have_is_refused_by_its_row(
    model: Model, token: int
) -> None:
    rows = [row("one", 0, PROMPT), row("odd", 0, [7, token])]
    sweep = model.engine(0, LAST).begin(MODEL)
    with pytest.raises(RowsRefused, match="ids go from 0 to 95") as refused:
        sweep.join(part(rows, 0, LAST))
    assert refused.value.sequences == ("odd",)
    sweep.join(part(rows[:1], 0, LAST))
    (result,) = finish(sweep, 1).values()
    assert [drawn.sequence for drawn in result.rows] == ["one"]


@pytest.mark.parametrize(
    "bad",
    [
        scored("s", -1, 5),
        scored("s", len(PROMPT), 5),
        scored("s", len(PROMPT) - 1, 5, 6),
        scored("s", 0, -1),
        scored("s", 0, 96),
    ],
)
def test_what_is_not_there_is_not_scored(model: Model, bad: Row) -> None:
    engine = model.engine()
    with pytest.raises(RowsRefused, match="to score") as refused:
        run(engine, part([row("fine", 0, PROMPT), bad], 0, LAST))
    assert refused.value.sequences == ("s",)
    assert engine.kv_used == 0


def test_what_cannot_join_leaves_the_sweep_as_it_was(model: Model) -> None:
    """From block 4 on a sequence has KV in one of four layers."""
    engine = model.engine(2, kv_tokens=48)
    sweep = engine.begin(MODEL)
    first = sweep.join(from_block(model, 2, row("first", 0, PROMPT, draw=0)))
    sweep.advance()
    with pytest.raises(CapacityExceeded):
        sweep.join(from_block(model, 4, row("big", 0, [1] * 129)))
    fits = sweep.join(from_block(model, 4, row("fits", 0, [1] * 128, draw=0)))
    with pytest.raises(NotFound):
        engine.begin(MODEL).join(part([row("early", 0, [1])], 0, LAST))
    left = finish(sweep, 2)
    assert list(*left[first].sampled) == model.expected_tokens(PROMPT, 1)
    assert list(*left[fits].sampled) == model.expected_tokens([1] * 128, 1)
    assert engine.kv_used == engine.kv_capacity == 48


def test_freed_rows_leave_and_their_pages_can_be_had(model: Model) -> None:
    engine = model.engine(kv_tokens=64)
    sweep = engine.begin(MODEL)
    rows = [row(key, 0, [*PROMPT, i], limit=30, draw=0) for i, key in enumerate("abc")]
    first = sweep.join(part(rows, 0, LAST))
    waiting = sweep.join(from_block(model, 5, row("waiting", 0, [1])))
    sweep.advance()
    sweep.advance()
    engine.free(("b", "waiting"))
    second = sweep.join(from_block(model, 3, row("new", 0, [5] * 20, limit=40, draw=0)))
    left = finish(sweep, 3)
    assert left[waiting] == PartResult((), None, ())
    assert left[first].rows == (rows[0], rows[2])
    for index, name in ((0, "a"), (2, "c")):
        (expected,) = model.expected_tokens([*PROMPT, index], 1)
        assert left[first].sampled["ac".index(name)] == (expected,)
    assert list(*left[second].sampled) == model.expected_tokens([5] * 20, 1)
    (again,) = run(engine, part([row("a", 8, [44], limit=30, draw=1)], 0, LAST)).sampled
    assert list(again) == model.expected_tokens([*PROMPT, 0, 44], 1)


def test_hidden_states_of_those_who_stay_when_others_are_freed(model: Model) -> None:
    engine = model.engine()
    sweep = engine.begin(MODEL)
    rows = [row("a", 0, [1, 2, 3]), row("b", 0, PROMPT), row("c", 0, [4])]
    number = sweep.join(part(rows, 0, 4))
    sweep.advance()
    engine.free(("a", "c"))
    result = finish(sweep, 1)[number]
    assert result.rows == (rows[1],)
    assert result.hidden is not None
    assert torch.equal(result.hidden, hidden_before(model, 4, [row("b", 0, PROMPT)]))


def test_a_model_closed_on_the_way(model: Model) -> None:
    engine = model.engine()
    sweep = engine.begin(MODEL)
    number = sweep.join(part([row("s", 0, PROMPT, draw=0)], 0, LAST))
    waiting = sweep.join(from_block(model, 5, row("w", 0, PROMPT)))
    sweep.advance()
    engine.close_model(MODEL)
    assert sweep.advance() == {number: PartResult((), None, ()), waiting: PartResult((), None, ())}
    with pytest.raises(NotFound):
        sweep.join(part([row("t", 0, [1])], 1, LAST))


def test_the_floor_is_shared_among_the_blocks_that_are_run(model: Model) -> None:
    engine = TorchEngine("cpu", 1024, threads=1, step_floor_s=0.6)
    engine.open_model(MODEL, model.manifest)
    for block in (3, 4):
        engine.attach(MODEL, block, memoryview(model.buffers[block]))
    sweep = engine.begin(MODEL)
    assert sweep.due_s == 0
    one = row("s", 0, [1])
    sweep.join(part(untokened([one]), 3, 5, hidden_before(model, 3, [one])))
    due = []
    while not sweep.advance(600.0):  # a block at a time, since the caller waits after each
        due.append(sweep.due_s)
    assert [*due, sweep.due_s] == pytest.approx([0.1, 0.2])
    assert model.engine().begin(MODEL).due_s == 0


@pytest.mark.parametrize("cpu_weights", ["packed", "stored"])
@pytest.mark.parametrize("length", [7, 40])
def test_a_stage_that_runs_on_block_by_block_gives_the_tokens_of_transformers(
    model: Model, monkeypatch: pytest.MonkeyPatch, cpu_weights: Form, length: int
) -> None:
    """The first stage goes from block to block with what it made, in one sweep and in others, and
    the cut stays where the rest was taken over (`services.node.core.live_scaling`)."""
    monkeypatch.setattr(model, "cpu_weights", cpu_weights)
    prompt = [(5 * i) % 96 for i in range(length)]
    first, second = model.engine(0, 5), model.engine(2)
    one = row("s", 0, prompt, draw=0)
    hidden = run(first, part([one], 0, 1)).hidden
    other = row("t", 0, prompt[::-1], draw=0)
    for block in (1, 2, 3):
        riders = [part(untokened([one]), block, block + 1, hidden)]
        if block == 2:
            riders.append(part([other], 0, 4))
        hidden = run_all(first, riders)[0].hidden
    ((token,),) = run(second, part(untokened([one]), 4, LAST, hidden)).sampled
    tokens = [token]
    for index in range(1, 6):
        step = row("s", length + index - 1, [tokens[-1]], draw=index)
        hidden = run(first, part([step], 0, 4)).hidden
        ((token,),) = run(second, part(untokened([step]), 4, LAST, hidden)).sampled
        tokens.append(token)
    assert tokens == model.expected_tokens(prompt, 6, tokens)


def test_a_stage_that_ran_on_to_the_end_goes_on_alone_and_shares_none_of_its_pages(
    model: Model,
) -> None:
    """Its first tokens are not known where the last block runs, and pages are shared by tokens."""
    engine, length = model.engine(), PAGE + 3
    prompt = [(5 * i) % 96 for i in range(length)]
    one = row("s", 0, prompt, draw=0)
    hidden = run(engine, part([one], 0, 2)).hidden
    ((token,),) = run(engine, part(untokened([one]), 2, LAST, hidden)).sampled
    tokens = [token]
    for index in range(1, 2 * PAGE):
        step = row("s", length + index - 1, [tokens[-1]], draw=index)
        ((token,),) = run(engine, part([step], 0, LAST)).sampled
        tokens.append(token)
    assert tokens == model.expected_tokens(prompt, 2 * PAGE, tokens)
    for cached in (prompt, tokens):
        assert engine.adopt(MODEL, "next", (*cached, 0), 3 * PAGE) == 0


def test_a_stage_runs_on_only_from_where_it_is(model: Model) -> None:
    engine = model.engine()
    one = row("s", 0, PROMPT, draw=0)
    hidden = run(engine, part([one], 0, 2)).hidden
    for start, rows in ((3, [one]), (1, [one]), (2, [row("s", 0, PROMPT[:-1])])):
        given = hidden[: len(rows[0].tokens)] if hidden is not None else None
        with pytest.raises((BadInput, Conflict)):
            engine.begin(MODEL).join(part(untokened(rows), start, 4, given))
