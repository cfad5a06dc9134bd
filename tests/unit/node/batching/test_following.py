"""The scheduler as a later stage, and the sweeps that it makes of the work at hand."""

import pytest

from services.node.core.following import Followed
from services.node.core.following import State as FollowedState
from services.node.core.microbatches import (
    Failed,
    Failure,
    Forward,
    Free,
    Path,
    Release,
    Sampled,
    Send,
)
from services.node.core.rows import Row
from services.node.core.sequences import Sequence
from services.node.core.sequences import State as LedState
from shared.errors import IllegalTransition, ProtocolViolation
from shared.ids import ModelId
from tests.support.submits import BLOCKS, MODEL, THREE, TWO, WHOLE, stages, submit
from tests.unit.node.batching.builders import (
    FROM_C,
    Named,
    batcher,
    come,
    forward,
    one,
    queue,
    rows,
    run,
    take,
)

WHY = Failure("peer_lost", "gone")


FROM_D = Path(MODEL, stages(("d", 0, 2), ("a", 2, BLOCKS)))


def test_micro_batches_for_the_same_blocks_run_together_and_part_again() -> None:
    core = batcher(step_tokens=8)
    come(core, forward(FROM_C, Row("x#1", 0, 3, 9), batch=4), Named("from c"))
    come(core, forward(FROM_D, Row("y#1", 0, 2, 9), batch=7), Named("from d"))
    work = take(core)
    assert [part.hidden for part in work] == [Named("from c"), Named("from d")]
    assert not core.take()
    assert core.ran(work[0], [(5,)], None) == [Send("mem://c", Sampled(4, (("x#1", (5,)),)))]
    assert core.ran(work[1], [()], None) == [Send("mem://d", Sampled(7, (("y#1", ()),)))]
    assert core.tokens_out == 1


def test_one_sweep_takes_every_range_of_the_model() -> None:
    core = batcher("b", step_tokens=8)
    queue(
        core, one("led", stages(("b", 0, BLOCKS))), one("leads", stages(("b", 0, 1), ("c", 1, 6)))
    )
    come(core, forward(Path(MODEL, TWO), Row("x#1", 0, 2, 9)))
    come(core, forward(Path(MODEL, THREE), Row("y#1", 0, 2, 9)))
    assert [(part.start, part.stop) for part in take(core)] == [(0, 1), (2, 6), (1, 4), (0, 6)]


def test_a_sweep_is_of_one_model() -> None:
    core = batcher()
    other = Path(ModelId("other"), FROM_C.stages)
    for path, name in ((FROM_C, "x"), (other, "y"), (FROM_D, "z"), (other, "w")):
        come(core, forward(path, Row(f"{name}#1", 0, 1, 9)))
    assert [row[0] for row in rows(take(core))] == ["x#1", "z#1"]
    come(core, forward(FROM_D, Row("v#1", 0, 1, 9)))
    assert [part.keys for part in core.join(MODEL, 2, ())] == [("v#1",)]
    assert [row[0] for row in rows(take(core))] == ["y#1", "w#1"]


def test_what_comes_during_a_sweep_joins_it_ahead_and_while_there_is_room() -> None:
    core = batcher("b", step_tokens=8)
    come(core, forward(Path(MODEL, TWO), Row("aboard#1", 0, 3, 9)))
    aboard = take(core)
    late = Path(MODEL, stages(("d", 0, 3), ("b", 3, 6)))
    come(core, forward(Path(MODEL, TWO), Row("behind#1", 0, 1, 9)))
    come(core, forward(late, Row("large#1", 0, 6, 9), batch=1))
    come(core, forward(late, Row("fits#1", 0, 5, 9), batch=2))
    come(core, forward(late, Row("more#1", 0, 1, 9), batch=3))
    assert [part.keys for part in core.join(MODEL, 3, aboard)] == [("fits#1",)]
    assert [row[0] for row in rows(take(core))] == ["behind#1", "large#1", "more#1"]


def test_a_merged_run_stays_within_a_step() -> None:
    core = batcher(step_tokens=4)
    come(core, forward(FROM_C, Row("x#1", 0, 3, 9)))
    come(core, forward(FROM_D, Row("y#1", 0, 2, 9)))
    assert rows(take(core)) == [("x#1", 0, 3)]
    assert rows(take(core)) == [("y#1", 0, 2)]


def test_the_oldest_runs_first_be_it_led_or_followed() -> None:
    core = batcher()
    queue(core, one("led", WHOLE))
    first = take(core)
    come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    run(core, first)
    come(core, forward(FROM_D, Row("y#1", 0, 4, 9)))
    order = [[row[0] for row in rows(take(core))] for _ in range(2)]
    assert order == [["x#1", "led#1"], ["y#1"]]


def test_a_middle_stage_passes_rows_on_without_tokens() -> None:
    core = batcher("b")
    path = Path(MODEL, THREE)
    row = Row("x#1", 0, 2, 9)
    come(core, forward(path, row, batch=3), Named("in"))
    assert core.ran(take(core)[0], [()], Named("out")) == [
        Send("mem://c", Forward(path, 2, 3, (row,)), Named("out"))
    ]


def test_a_row_that_comes_after_its_sequence_was_freed_makes_no_kv() -> None:
    core = batcher()
    assert core.received(Free(("x#1",))) == []
    (told,) = come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    assert isinstance(told, Send)
    assert isinstance(told.message, Failed)
    assert told.address == "mem://c"
    assert not core.take()
    assert core.running == 0


def test_a_freed_sequence_leaves_the_queue_and_the_others_keep_their_hidden_states() -> None:
    core = batcher(step_tokens=9)
    come(core, forward(FROM_C, Row("x#1", 0, 3, 9), Row("y#1", 0, 2, 9)), Named("hidden"))
    assert core.received(Free(("x#1",))) == [Release(("x#1",))]
    (part,) = take(core)
    assert (part.keys, part.offsets, part.hidden) == (("y#1",), (3,), Named("hidden"))


@pytest.mark.parametrize(
    "second",
    [Row("x#1", 0, 1, 9), Row("x#1", 3, 1, 9), Row("x#1", 2, 8, 9), Row("z#1", 2, 1, 9)],
    ids=["again", "gap", "past its limit", "unknown"],
)
def test_a_row_that_does_not_go_on_fails_at_its_leader(second: Row) -> None:
    core = batcher()
    come(core, forward(FROM_C, Row("x#1", 0, 2, 9)))
    commands = come(core, forward(FROM_C, second, batch=2))
    failed = [c.message for c in commands if isinstance(c, Send)]
    assert [f.sequences for f in failed if isinstance(f, Failed)] == [(second.sequence,)]


def test_another_paths_sequence_is_out_of_reach() -> None:
    core = batcher()
    come(core, forward(FROM_C, Row("x#1", 0, 2, 9)))
    (told,) = come(core, forward(FROM_D, Row("x#1", 2, 1, 9)))
    assert isinstance(told, Send)
    assert told.address == "mem://d"
    assert core.running == 1


def test_a_micro_batch_for_another_node_is_a_violation() -> None:
    with pytest.raises(ProtocolViolation):
        batcher("z").received(forward(FROM_C, Row("x#1", 0, 1, 9)))


def test_a_lost_leader_frees_its_sequences_and_no_others() -> None:
    core = batcher()
    come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    come(core, forward(FROM_D, Row("y#1", 0, 1, 9)))
    assert Release(("x#1",)) in core.peer_lost("mem://c", WHY)
    assert rows(take(core)) == [("y#1", 0, 1)]


def test_a_result_for_sequences_that_ended_meanwhile_goes_nowhere() -> None:
    core = batcher("b")
    path = Path(MODEL, THREE)
    come(core, forward(path, Row("x#1", 0, 2, 9)))
    work = take(core)
    core.received(Free(("x#1",)))
    assert core.ran(work[0], [()], Named("out")) == []


def test_a_second_row_of_a_sequence_whose_first_still_waits_is_refused() -> None:
    core = batcher()
    come(core, forward(FROM_C, Row("x#1", 0, 2, 9)))
    released, told = come(core, forward(FROM_C, Row("x#1", 2, 1, 9), batch=2))
    assert released == Release(("x#1",))
    assert isinstance(told, Send)
    assert isinstance(told.message, Failed)
    core.validate()
    assert core.take() == ()


@pytest.mark.parametrize("step", [FollowedState.QUEUED, FollowedState.PREPARING])
def test_a_followed_sequence_takes_no_step_that_its_table_lacks(step: FollowedState) -> None:
    followed = Followed("x#1", FROM_C, 1, 9, 2, True, 1)
    followed.to(FollowedState.QUEUED)
    with pytest.raises(IllegalTransition, match="queued -> "):
        followed.to(step)


def test_a_led_sequence_takes_no_step_that_its_table_lacks() -> None:
    sequence = Sequence.of(submit("r", WHOLE), 0, keeps_kv=True)
    with pytest.raises(IllegalTransition, match="new -> running"):
        sequence.to(LedState.RUNNING)
    sequence.to(LedState.WAITING)
    sequence.to(LedState.RUNNING)
    with pytest.raises(IllegalTransition, match="running -> waiting"):
        sequence.to(LedState.WAITING)
