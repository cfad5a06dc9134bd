"""The modelled engine: the times it takes, the tokens it draws, and what it refuses."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.node.core.microbatches import Forward, Path
from services.node.engine.base import StagePart
from services.node.engine.budget import KvBudget
from services.node.execution import activations
from shared.errors import BadInput, CapacityExceeded, Conflict, NotFound
from shared.ids import ModelId, NodeId
from shared.messages.instances import Stage
from simulation.engine import Costs, ModelledEngine, token_of
from simulation.hardware import hardware
from simulation.models import model, modelled_manifest
from tests.unit.simulation.models import (
    BLOCKS,
    HARDWARE,
    ID,
    MANIFEST,
    MODEL,
    buffer,
    engine,
    part,
    row,
    run,
)

COSTS = Costs(MODEL, HARDWARE)
OVERHEAD = HARDWARE.sweep_overhead_s


def layers(start: int, stop: int) -> int:
    return sum(MODEL.block_layers(block) for block in MANIFEST.blocks[start:stop])


# --- time -------------------------------------------------------------------


def test_a_decode_is_bound_by_reading_weights_and_kv() -> None:
    on = engine()
    run(on, part([row("a#1", 0, 30)]), part([row("b#1", 0, 10)]))
    _, due = run(on, part([row("a#1", 30, 1, draw=0)]), part([row("b#1", 10, 1, draw=0)]))
    weights = (MODEL.layers * MODEL.layer_parameters + MODEL.head_parameters) * 2 / 1e6
    kv = (31 + 11) * MODEL.kv_bytes / 1e6
    assert due == pytest.approx(OVERHEAD + weights + kv + MODEL.layers * 0.001)


def test_a_prefill_is_bound_by_computing() -> None:
    n = 3000
    _, due = run(engine(kv_tokens=n), part([row("a#1", 0, n, limit=n)]))
    flops = 2 * MODEL.layers * MODEL.layer_parameters * n
    pairs = 4 * MODEL.layers * MODEL.heads * MODEL.head_dim * n * (n + 1) / 2
    assert due == pytest.approx(OVERHEAD + (flops + pairs) / 1e9 + MODEL.layers * 0.001)


def test_seven_billion_parameters_decode_in_some_milliseconds() -> None:
    """6.6e9 parameters that are read, 2 bytes each, at 0.8 x 3.35 TB/s: 4.9 ms."""
    costs = Costs(model("llama-2-7b"), hardware("h800-400g"))
    step = costs.sweep_overhead + costs.layers(32, 1, 500, 500) + costs.head(1)
    assert 0.0049 < step < 0.008


def test_the_head_is_run_only_for_draws() -> None:
    _, without = run(engine(), part([row("a#1", 0, 1)]))
    _, drawn = run(engine(), part([row("a#1", 0, 1, draw=0)]))
    assert drawn - without == pytest.approx(MODEL.head_parameters * 2 / 1e6)


@given(
    st.lists(
        st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.integers(1, 20)).filter(
            lambda stage: stage[0] < stage[1]
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_sweep_takes_what_its_blocks_take(stages: list[tuple[int, int, int]]) -> None:
    """However it is cut by those who get on and off."""
    parts = [
        part([row(f"s{i}#1", 0, count)], start, stop)
        for i, (start, stop, count) in enumerate(stages)
    ]
    _, due = run(engine(), *parts)
    expected = OVERHEAD
    for block in range(BLOCKS):
        aboard = [count for start, stop, count in stages if start <= block < stop]
        if aboard:
            pairs = sum(n * (n + 1) / 2 for n in aboard)
            expected += COSTS.layers(layers(block, block + 1), sum(aboard), sum(aboard), pairs)
    assert due == pytest.approx(expected)


# --- getting on and off -----------------------------------------------------


def steps(on_way: StagePart, *, alive: tuple[tuple[int, int], ...] = ()) -> list[int]:
    """Where a sweep with this part stops, while sequences of such stages live in the engine."""
    on = engine()
    for i, (start, stop) in enumerate(alive):
        run(on, part([row(f"alive{i}#1", 0, 1)], start, stop))
    sweep = on.begin(ID)
    sweep.join(on_way)
    stops = []
    while not sweep.advance():
        stops.append(sweep.at)
    return [*stops, sweep.at]


def test_a_sweep_goes_through_at_once_where_nobody_can_get_on() -> None:
    whole = part([row("a#1", 0, 1)])
    assert steps(whole) == [BLOCKS]
    assert steps(whole, alive=((0, BLOCKS), (0, 3))) == [BLOCKS]
    assert steps(whole, alive=((2, 4), (4, BLOCKS), (2, 3))) == [2, 4, BLOCKS]
    assert steps(part([row("a#1", 0, 1)], 3, 5), alive=((2, 4), (4, 5))) == [4, 5]


def test_parts_get_on_where_they_start_and_off_where_they_stop() -> None:
    on = engine()
    sweep = on.begin(ID)
    first = sweep.join(part([row("a#1", 0, 2)], 1, 4))
    second = sweep.join(part([row("b#1", 0, 1)], 3, BLOCKS))
    assert sweep.advance() == {}
    assert sweep.at == 3
    with pytest.raises(BadInput, match="sweep at block 3"):
        sweep.join(part([row("late#1", 0, 1)], 2, 4))
    third = sweep.join(part([row("c#1", 0, 1, draw=4)], 3, BLOCKS))
    left = sweep.advance()
    assert list(left) == [first]
    hidden = left[first].hidden
    assert hidden is not None
    assert hidden.shape == (2, MODEL.hidden)
    left = sweep.advance()
    assert {number: result.sampled for number, result in left.items()} == {
        second: ((),),
        third: ((token_of("c", 4, MODEL.vocab),),),
    }
    assert sweep.advance() == {}


def test_freed_rows_leave_the_sweep() -> None:
    on = engine()
    run(on, part([row("other#1", 0, 1)], 2, BLOCKS))
    sweep = on.begin(ID)
    some = sweep.join(part([row("a#1", 0, 5), row("b#1", 0, 1, draw=0)]))
    gone = sweep.join(part([row("c#1", 0, 1)], 2, BLOCKS))
    sweep.advance()
    on.free(("a#1", "c#1", "unknown#1"))
    left = sweep.advance()
    assert left[gone].rows == ()
    assert [one.sequence for one in left[some].rows] == ["b#1"]
    alone = engine()
    due = sweep.due_s - OVERHEAD - COSTS.layers(layers(0, 2), 6, 6, 16)
    _, expected = run(alone, part([row("b#1", 0, 1, draw=0)], 2, BLOCKS))
    assert due == pytest.approx(expected - OVERHEAD)


# --- tokens and hidden states -----------------------------------------------


@given(
    st.text(min_size=1).filter(lambda name: "#" not in name),
    st.integers(0, 10_000),
    st.integers(1, 200_000),
)
def test_tokens_are_in_the_vocabulary(request: str, index: int, vocab: int) -> None:
    assert 0 <= token_of(request, index, vocab) < vocab
    assert token_of(request, index, vocab) == token_of(request, index, vocab)


@pytest.mark.parametrize("cuts", [(), (3,), (1, 2, 5)])
@pytest.mark.parametrize("attempt", [1, 2])
def test_any_path_and_attempt_draws_the_same_tokens(cuts: tuple[int, ...], attempt: int) -> None:
    stages = list(pairwise((0, *cuts, BLOCKS)))
    engines = [engine(start, stop) for start, stop in stages]
    tokens: list[int] = []
    for index in range(20):
        position, count = (0, 7) if index == 0 else (6 + index, 1)
        one = row(f"req-1#{attempt}", position, count, draw=index)
        for on, (start, stop) in zip(engines, stages, strict=True):
            (result,), _ = run(on, part([one], start, stop))
        tokens += result.sampled[0]
    assert tokens == [token_of("req-1", index, MODEL.vocab) for index in range(20)]
    assert len(set(tokens)) > 10


def test_hidden_states_cross_the_wire_in_their_true_size() -> None:
    rows = (row("a#1", 0, 7), row("b#1", 0, 2))
    (result,), _ = run(engine(), part(rows, 0, 3))
    path = Path(ID, (Stage(NodeId("a"), "mem://a", 0, 3), Stage(NodeId("b"), "mem://b", 3, BLOCKS)))
    bare = tuple(one for one in part(rows, 3, BLOCKS).rows)
    header, payload = activations.encode(Forward(path, 1, 1, bare), result.hidden)
    (body,) = payload
    assert isinstance(body, memoryview)
    assert body.nbytes == 9 * MODEL.hidden * 2
    _, hidden, _ = activations.decode(memoryview(header), body)
    assert hidden is not None
    assert hidden.dtype == torch.float16
    assert result.hidden is not None
    assert hidden.data_ptr() == result.hidden.data_ptr()
    run(engine(), StagePart(3, BLOCKS, bare, hidden))


# --- what is refused --------------------------------------------------------


def test_a_block_that_is_not_attached_is_not_run() -> None:
    on = engine(1, 4)
    assert on.held(ID) == {1, 2, 3}
    assert on.held(ModelId("other")) == frozenset()
    sweep = on.begin(ID)
    for start, stop in ((0, 2), (3, 5), (0, BLOCKS)):
        with pytest.raises(NotFound, match="not held"):
            sweep.join(part([row("a#1", 0, 1)], start, stop))
    assert on.kv_used == 0
    on.attach(ID, 4, buffer(4))
    run(on, part([row("a#1", 0, 1)], 3, 5))
    on.close_model(ID)
    with pytest.raises(NotFound, match="not open"):
        on.begin(ID).join(part([row("b#1", 0, 1)], 3, 5))
    on.open_model(ID, MANIFEST)
    assert on.held(ID) == frozenset()


def test_bytes_that_nobody_verified_are_not_attached() -> None:
    on = engine(0, 0)
    damaged = buffer(2)
    damaged[-1] ^= 1
    with pytest.raises(AssertionError, match=r"block 2 .* not verified"):
        on.attach(ID, 2, damaged)
    assert on.held(ID) == frozenset()
    with pytest.raises(NotFound):
        on.attach(ID, BLOCKS, buffer(0))
    with pytest.raises(Conflict):
        on.open_model(ID, MANIFEST)


def test_kv_is_taken_in_pages_as_sequences_grow_and_given_back() -> None:
    on = engine(kv_tokens=90)
    run(on, part([row("a#1", 0, 17)]))
    run(on, part([row("a#1", 17, 32)]))
    assert (on.kv_used, on.kv_capacity) == (64, 96)
    sweep = on.begin(ID)
    with pytest.raises(CapacityExceeded, match="32 of 96"):
        sweep.join(part([row("b#1", 0, 16), row("c#1", 0, 17)]))
    assert on.kv_used == 64
    sweep.join(part([row("b#1", 0, 32)]))
    on.free(("a#1",))
    on.free(("a#1",))
    assert on.kv_used == 32
    on.close_model(ID)
    assert on.kv_used == 0


def test_models_share_the_memory_for_kv_as_on_a_real_node() -> None:
    on, other = ModelledEngine(HARDWARE, KvBudget(64 * 16 * MODEL.kv_bytes)), ModelId("other")
    for opened in (ID, other):
        on.open_model(opened, MANIFEST)
        for block in range(BLOCKS):
            on.attach(opened, block, buffer(block))
    assert on.kv_capacity == 64 * 16
    assert on.kv_share(ID) == on.kv_share(other) == 32 * 16
    assert on.kv_free(ID, {}) == 60 * 16, "all but what the other one may begin with"
    run(on, part([row(f"a{i}#1", 0, 50) for i in range(15)]))
    assert (on.kv_used, on.kv_free(ID, {}), on.kv_free(other, {})) == (60 * 16, 0, 4 * 16)
    on.make_room({other: 8 * 16})
    on.free(tuple(f"a{i}#1" for i in range(15)))
    assert on.kv_free(other, {}) == 60 * 16


def test_a_stage_without_layers_needs_no_kv() -> None:
    """The embedding alone."""
    cut_by_unit = modelled_manifest(MODEL, blocks=MODEL.layers + 2, unit=64)
    on = ModelledEngine(HARDWARE, 10)
    on.open_model(ID, cut_by_unit)
    on.attach(ID, 0, buffer(0, cut_by_unit))
    sweep = on.begin(ID)
    number = sweep.join(part([row("a#1", 0, 1, limit=60)], 0, 1))
    assert on.kv_used == 0
    assert list(sweep.advance()) == [number]
    assert sweep.due_s == OVERHEAD


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (part([row("new#1", 4, 1)]), NotFound),
        (part([row("a#1", 6, 1)]), Conflict),
        (part([row("a#1", 0, 1)]), Conflict),
        (part([row("a#1", 5, 1)], 2, BLOCKS), Conflict),
        (part([row("a#1", 5, 46)]), BadInput),
        (part([]), BadInput),
        (part([row("b#1", 0, 1)], 3, BLOCKS + 1), BadInput),
        (StagePart(0, BLOCKS, part([row("b#1", 0, 2)], 2).rows), BadInput),
        (StagePart(2, BLOCKS, (row("b#1", 0, 2),)), BadInput),
    ],
)
def test_rows_that_do_not_fit_change_nothing(bad: StagePart, error: type[Exception]) -> None:
    on = engine()
    run(on, part([row("a#1", 0, 5)]))
    used = on.kv_used
    sweep = on.begin(ID)
    with pytest.raises(error):
        sweep.join(bad)
    assert on.kv_used == used
    run(on, part([row("a#1", 5, 1)]))
