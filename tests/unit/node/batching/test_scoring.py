"""Log probabilities of tokens, and of the prompts that are scored."""

from typing import Any

import msgspec
import pytest

from services.node.core.batching import Batcher
from services.node.core.microbatches import Emit, Forward, Path, Sampled, Send
from services.node.core.rows import Row, Score
from services.node.core.sequences import ENOUGH, SCORED_POSITIONS
from shared.errors import BadInput
from shared.ids import RequestId
from shared.messages.serving import AttemptFailed, Logprobs, Sampling, Scores, Token
from tests.support.submits import MODEL, THREE, TWO, WHOLE, submit
from tests.unit.node.batching.builders import (
    FULL,
    FakeKv,
    Named,
    Work,
    batcher,
    come,
    forward,
    one,
    queue,
    rows,
    run,
    take,
)


def test_log_probabilities_go_out_with_their_tokens() -> None:
    core = batcher()
    queue(core, one("r", WHOLE), one("s", WHOLE))
    (part,) = take(core)
    found = Logprobs(-0.5, ((4, -0.5),))
    commands = core.ran(part, [(4,), (5,)], None, {"r#1": (found,)})
    said = [c.what for c in commands if isinstance(c, Emit)]
    assert [what.logprobs for what in said if isinstance(what, Token)] == [found, None]


SCORED = submit("r", WHOLE, prompt=tuple(range(10, 16)), logprobs=2, score_from=1)


def known(*tokens: int) -> tuple[Logprobs, ...]:
    """What the engine says of them."""
    return tuple(Logprobs(-float(token), ()) for token in tokens)


def land_scored(core: Batcher, work: Work) -> list[tuple[int, list[float]]]:
    """Has the engine score what it should: (index, log probabilities) of what goes out."""
    (part,) = work
    found = {row.sequence: known(*row.score.tokens) for row in part.rows if row.score}
    sampled = [(1,) if row.draw else () for row in part.rows]
    said = [c.what for c in core.ran(part, sampled, None, found) if isinstance(c, Emit)]
    return [
        (one.index, [each.drawn for each in one.logprobs])
        for one in said
        if isinstance(one, Scores)
    ]


def scores(work: Work) -> list[Score | None]:
    return [row.score for part in work for row in part.rows]


def test_a_prompt_is_scored_chunk_by_chunk() -> None:
    """The last position is that of the first draw."""
    core = batcher(step_tokens=4)
    queue(core, SCORED)
    first = take(core)
    assert scores(first) == [Score(0, (11, 12, 13, 14), 2)]
    assert land_scored(core, first) == [(-5, [-11.0, -12.0, -13.0, -14.0])]
    second = take(core)
    assert scores(second) == [Score(0, (15,), 2)]
    assert land_scored(core, second) == [(-1, [-15.0])]
    assert scores(take(core)) == [None]


def test_only_a_beginning_that_was_scored_is_looked_for_in_the_cache() -> None:
    kv = FakeKv()
    core = batcher(kv=kv)
    for name, score_from in (("all", 1), ("rest", 4), ("none", 0), ("done", 6)):
        again = msgspec.structs.replace(SCORED, request=RequestId(name), score_from=score_from)
        queue(core, again)
    take(core)

    assert kv.asked == {
        "all#1": (10,),
        "rest#1": (10, 11, 12, 13),
        "none#1": SCORED.tokens,
        "done#1": SCORED.tokens,
    }


def test_a_preempted_request_is_scored_from_where_it_was() -> None:
    core = batcher(step_tokens=4)
    queue(core, submit("old", WHOLE, prompt=(1,)), SCORED)
    (part,) = take(core)
    assert rows((part,)) == [("old#1", 0, 1), ("r#1", 0, 3)]
    assert land_scored(core, (part,)) == [(-5, [-11.0, -12.0, -13.0])]
    (part,) = take(core)
    core.no_room(part, FULL)
    run(core, (core.live(part),))
    steps = []
    for _ in range(3):
        work = take(core)
        steps += [(row.position, row.score) for p in work for row in p.rows if "~1" in row.sequence]
        land_scored(core, work)
    assert steps == [(0, Score(3, (14,), 2)), (4, Score(0, (15,), 2)), (6, None)]


def test_a_prompt_that_was_not_scored_ends_its_request() -> None:
    for path, given in ((WHOLE, ()), (TWO, known(11, 12))):
        core = batcher(step_tokens=4)
        queue(core, msgspec.structs.replace(SCORED, stages=path))
        (part,) = take(core)
        commands = core.ran(part, [()], None, {"r#1": given})
        if path is TWO:
            commands = core.received(Sampled(part.batch, (("r#1", ()),), {"r#1": given}))
        (failed,) = (c.what for c in commands if isinstance(c, Emit))
        assert isinstance(failed, AttemptFailed)
        assert failed.code == "protocol"


def test_what_is_to_be_scored_goes_to_the_stage_with_the_head() -> None:
    core = batcher("b")
    row = Row("r#1", 0, 2, 9, score=Score(0, (5, 6), 1))
    come(core, forward(Path(MODEL, THREE), row), Named("hidden"))
    (part,) = take(core)
    (sent,) = core.ran(part, [()], Named("hidden"))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Forward)
    assert sent.message.rows == (row,)


def test_no_more_is_scored_in_a_step_than_a_message_takes() -> None:
    core = batcher(step_tokens=10_000, kv=FakeKv(10_000))
    for name, count in (("a", ENOUGH - 112), ("b", 900)):
        prompt = tuple(range(count))
        queue(core, submit(name, WHOLE, prompt=prompt, logprobs=20, score_from=1))
    steps = []
    for _ in range(2):
        work = take(core)
        steps.append(rows(work))
        land_scored(core, work)
    assert steps[0] == [("a#1", 0, 400), ("b#1", 0, SCORED_POSITIONS - 400)]
    assert ("b#1", 624, 276) in steps[1]


@pytest.mark.parametrize(
    "changes",
    [{"score_from": -1}, {"score_from": 7}, {"sampling": Sampling()}, {"image": b"pixels"}],
)
def test_a_prompt_that_cannot_be_scored_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        queue(batcher(), msgspec.structs.replace(SCORED, **changes))
