"""The scheduler by example; its invariants are in tests/property/test_batching.py."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.node.core.batching import Batcher
from services.node.core.microbatches import (
    Admit,
    Admitted,
    Command,
    Emit,
    Failed,
    Failure,
    Forward,
    Free,
    Part,
    Path,
    Prepare,
    Release,
    Sampled,
    Send,
)
from services.node.core.rows import Context, Draw, Row, Score
from services.node.core.sequences import sequence_key
from services.node.core.speculation import STEP_POSITIONS
from shared.errors import (
    BadInput,
    CapacityExceeded,
    ProtocolViolation,
    StaleEpoch,
    TransportTimeout,
)
from shared.ids import ModelId, RequestId
from shared.messages.instances import Stage
from shared.messages.serving import (
    AttemptFailed,
    Cancel,
    LogitRules,
    Logprobs,
    Sampling,
    Scores,
    Submit,
    Token,
)
from shared.slots import OVERFULL
from tests.support.worker_cluster import BLOCKS, MODEL, THREE, TWO, WHOLE, stages, submit

WHY = Failure("peer_lost", "gone")
FROM_C = Path(MODEL, stages(("c", 0, 2), ("a", 2, BLOCKS)))
FROM_D = Path(MODEL, stages(("d", 0, 2), ("a", 2, BLOCKS)))


@dataclass
class FakeKv:
    kv_capacity: int = 1000
    kv_used: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """Positions that sequences begin with, by their keys."""
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The tokens of each question to the prefix cache, by the sequence's key."""
    without: set[ModelId] = field(default_factory=set)
    """Models that keep none."""

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        return model_id not in self.without

    def adopt(self, model_id: ModelId, key: str, tokens: tuple[int, ...], limit: int) -> int:
        self.asked[key] = tokens
        return self.cached.get(key, 0)


class Named(str):
    """Hidden states, of which a name is enough."""

    shape = (0, 0)


def batcher(
    node: str = "a",
    *,
    slots: int = 8,
    step_tokens: int = 4,
    speculation: int = 0,
    kv: FakeKv | None = None,
) -> Batcher:
    return Batcher(
        stages((node, 0, 1))[0].node,
        slots=slots,
        step_tokens=step_tokens,
        speculation=speculation,
        kv=kv or FakeKv(),
    )


def queue(core: Batcher, *messages: Submit) -> None:
    """All stages of their paths have room."""
    for message in messages:
        for asked in ask(core, message):
            core.received(Admitted(asked.stage, asked.sequence))


def ask(core: Batcher, message: Submit) -> list[Admit]:
    """What the other stages are asked."""
    commands = core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS))
    sent = [command.message for command in commands if isinstance(command, Send)]
    return [each for each in sent if isinstance(each, Admit)]


def come(core: Batcher, message: Forward, hidden: Any = None) -> list[Command]:
    """A micro-batch comes, whose leader has asked for room where sequences begin."""
    for row in message.rows:
        if not row.position and row.sequence not in core._follower.sequences:
            first = Admit(message.path, message.stage, row.sequence, row.count, row.limit)
            core.received(first)
    return core.received(message, hidden)


Work = tuple[Part, ...]


def take(core: Batcher) -> Work:
    work = core.take()
    assert work
    return work


def run(core: Batcher, work: Work, token: int = 1) -> list[Command]:
    commands: list[Command] = []
    for part in work:
        sampled = [(token,) if row.draw else () for row in part.rows]
        commands += core.ran(part, sampled, Named(f"hidden {part.batch}"))
    return commands


def rows(work: Work) -> list[tuple[str, int, int]]:
    return [(row.sequence, row.position, row.count) for part in work for row in part.rows]


def one(name: str, path: tuple[Stage, ...], size: int = 1) -> Submit:
    return submit(name, path, prompt=tuple(range(size)))


def picture(name: str, path: tuple[Stage, ...], size: int) -> Submit:
    return submit(name, path, prompt=(0,) * size, max_tokens=1, image=b"pixels")


RULED = LogitRules(grammar="g")


def ruled(name: str, path: tuple[Stage, ...] = WHOLE) -> Submit:
    return submit(name, path, prompt=(3, 1), rules=RULED)


def forward(path: Path, *given: Row, batch: int = 1) -> Forward:
    return Forward(path, 1, batch, given)


# --- leading ----------------------------------------------------------------


def test_images_go_whole_and_end_with_their_class() -> None:
    core = batcher(step_tokens=4)
    queue(core, *(picture(name, WHOLE, 3) for name in "abc"), picture("large", WHOLE, 9))
    steps = []
    for _ in range(2):
        work = take(core)
        assert all(row.image == b"pixels" for part in work for row in part.rows)
        steps.append(rows(work))
        said = [c.what for c in run(core, work, token=7) if isinstance(c, Emit)]
        assert {(s.token, s.finish) for s in said if isinstance(s, Token)} == {(7, "length")}
    assert steps == [[("a#1", 0, 3), ("b#1", 0, 3)], [("c#1", 0, 3), ("large#1", 0, 9)]]
    assert core.running == 0


def test_an_image_waits_for_its_turn_beside_other_paths() -> None:
    """A lane that found no budget keeps its age, and goes first in the next step."""
    core = batcher(step_tokens=4)
    queue(core, picture("a", WHOLE, 6), picture("b", TWO, 6))
    assert rows(take(core)) == [("b#1", 0, 6)]
    queue(core, picture("c", TWO, 6))
    assert rows(take(core)) == [("a#1", 0, 6)]


def test_an_image_waits_for_no_kv() -> None:
    core = batcher(kv=FakeKv(kv_capacity=32, kv_used=32))
    queue(core, picture("a", WHOLE, 3))
    assert rows(take(core)) == [("a#1", 0, 3)]


def test_an_image_needs_no_kv_cache_at_all() -> None:
    core = batcher(kv=FakeKv(kv_capacity=0))
    queue(core, picture("a", WHOLE, 3))
    assert rows(take(core)) == [("a#1", 0, 3)]


def test_a_later_stage_is_not_sent_the_image() -> None:
    core = batcher()
    queue(core, picture("a", TWO, 3))
    (sent,) = [c for c in run(core, take(core)) if isinstance(c, Send)]
    assert isinstance(sent.message, Forward)
    (passed,) = sent.message.rows
    assert (passed.sequence, passed.count, passed.image) == ("a#1", 3, b"")
    assert passed.draw is not None


def test_an_attempt_waits_for_its_grammar_and_lets_others_go_first() -> None:
    core = batcher()
    (asked,) = core.submit(ruled("g"), n_blocks=BLOCKS, held=range(BLOCKS))
    assert asked == Prepare(MODEL, "g#1", Context((3, 1), 2, (), RULED))
    queue(core, one("p", WHOLE))
    assert core.waiting == 2
    work = take(core)
    assert rows(work) == [("p#1", 0, 1)]
    assert core.prepared("g#1") == []
    run(core, work)
    assert {row[0] for row in rows(take(core))} == {"g#1", "p#1"}
    assert core.waiting == 0


def test_an_attempt_whose_grammar_cannot_be_made_fails_alone() -> None:
    core = batcher()
    queue(core, ruled("g"), one("p", WHOLE))
    released, told = core.prepared("g#1", Failure("bad_input", "no"))
    assert released == Release(("g#1",))
    assert isinstance(told, Emit)
    assert isinstance(told.what, AttemptFailed)
    assert (told.what.request, told.what.code, told.what.message) == ("g", "bad_input", "no")
    assert rows(take(core)) == [("p#1", 0, 1)]


def test_an_attempt_may_be_asked_about_and_cancelled_while_its_grammar_is_made() -> None:
    core = batcher()
    message = ruled("g")
    queue(core, message)
    assert core.submit(message, n_blocks=BLOCKS, held=range(BLOCKS)) == []
    assert core.cancel(Cancel(request=message.request, attempt=1)) == [Release(("g#1",))]
    assert (core.running, core.waiting) == (0, 0)


def test_what_was_made_for_an_attempt_that_did_not_begin_is_given_back() -> None:
    core = batcher()
    queue(core, ruled("g"))
    core.prepared("g#1")
    cancel = Cancel(request=ruled("g").request, attempt=1)
    assert core.cancel(cancel) == [Release(("g#1",))]


def test_a_preempted_attempt_has_its_grammar_made_anew_and_goes_first() -> None:
    kv = FakeKv(kv_capacity=40)
    core = batcher(kv=kv)
    queue(core, one("p", WHOLE), ruled("g"))
    core.prepared("g#1")
    run(core, take(core))
    (part,) = take(core)
    kv.kv_used = 32
    queue(core, one("late", WHOLE))
    released, asked = core.no_room(part, FULL)
    kv.kv_used = 16
    assert released == Release(("g#1",))
    assert asked == Prepare(MODEL, "g#1~1", Context((3, 1, 1), 2, (), RULED))
    core.prepared("g#1~1")
    run(core, (core.live(part),))
    assert {row[0] for row in rows(take(core))} == {"p#1", "g#1~1"}
    assert core.waiting == 1


def test_a_grammar_that_another_node_follows_is_not_made_by_the_leader() -> None:
    core = batcher()
    queue(core, ruled("g", TWO))
    assert rows(take(core)) == [("g#1", 0, 2)]


def test_an_attempt_that_comes_again_asks_whether_it_goes_on() -> None:
    """It does while it waits, and while it comes on; not in the same micro-batch for ever."""
    core = batcher()
    first, second = one("r", TWO, size=16), one("s", WHOLE)
    for _ in range(3):
        queue(core, first, second)
    assert (core.running, core.waiting) == (1, 1)
    core.cancel(Cancel(request=second.request, attempt=1))
    for _ in range(2):
        work = take(core)
        queue(core, first)
        core.received(Sampled(work[0].batch, (("r#1", ()),)))
    queue(core, first)
    run(core, take(core))
    queue(core, first)
    with pytest.raises(TransportTimeout, match="r is stuck on its path over a, b"):
        queue(core, first)
    core.cancel(Cancel(request=first.request, attempt=1))
    with pytest.raises(StaleEpoch):
        queue(core, first)


def test_an_attempt_that_this_node_runs_alone_goes_on_as_long_as_the_node_says_so() -> None:
    core = batcher()
    queue(core, one("r", WHOLE))
    take(core)
    queue(core, one("r", WHOLE), one("r", WHOLE))


def test_rules_go_with_the_draw_that_ends_a_prefill_alone() -> None:
    core = batcher(step_tokens=4)
    rules = LogitRules(presence_penalty=1.0)
    message = submit("r", WHOLE, prompt=tuple(range(5)), so_far=(9,), stop_ids=(3,), rules=rules)
    queue(core, message)
    contexts = []
    for token in (7, 7, 8):
        work = take(core)
        contexts.append([row.draw.context if row.draw else "none" for row in work[0].rows])
        run(core, work, token)
    context = Context((0, 1, 2, 3, 4, 9), 5, (3,), rules)
    assert contexts == [["none"], [context], [None]]


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
    prompt = tuple(range(700))
    queue(
        core,
        *(submit(name, WHOLE, prompt=prompt, logprobs=20, score_from=1) for name in "ab"),
        submit("plain", WHOLE, prompt=prompt),
    )
    steps = []
    for _ in range(2):
        work = take(core)
        steps.append(rows(work))
        land_scored(core, work)
    assert steps[0] == [("a#1", 0, 700), ("b#1", 0, 324), ("plain#1", 0, 700)]
    assert ("b#1", 324, 376) in steps[1]


@pytest.mark.parametrize(
    "changes",
    [{"score_from": -1}, {"score_from": 7}, {"sampling": Sampling()}, {"image": b"pixels"}],
)
def test_a_prompt_that_cannot_be_scored_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        queue(batcher(), msgspec.structs.replace(SCORED, **changes))


def test_a_long_prompt_is_run_in_chunks_beside_decodes() -> None:
    core = batcher(step_tokens=4)
    queue(core, one("short", WHOLE, 2))
    run(core, take(core))
    queue(core, one("long", WHOLE, 9), one("next", WHOLE, 3))
    steps = []
    for _ in range(4):
        work = take(core)
        steps.append(rows(work))
        run(core, work)
    assert steps == [
        [("short#1", 2, 1), ("long#1", 0, 4)],
        [("long#1", 4, 4), ("short#1", 3, 1)],
        [("long#1", 8, 1), ("next#1", 0, 3), ("short#1", 4, 1)],
        [("short#1", 5, 1), ("long#1", 9, 1), ("next#1", 3, 1)],
    ]


def test_a_prompt_that_waits_for_another_holds_up_no_other_path() -> None:
    core = batcher(step_tokens=4)
    queue(core, one("decode", TWO), one("long", WHOLE, 40), one("next", WHOLE, 40))
    steps = []
    for _ in range(4):
        work = take(core)
        steps.append(rows(work))
        for command in run(core, work):
            if isinstance(command, Send) and isinstance(command.message, Forward):
                core.received(Sampled(command.message.batch, (("decode#1", (1,)),)))
    assert steps == [
        [("decode#1", 0, 1), ("long#1", 0, 3)],
        [("long#1", 3, 4), ("decode#1", 1, 1)],
        [("long#1", 7, 4), ("decode#1", 2, 1)],
        [("long#1", 11, 4), ("decode#1", 3, 1)],
    ]


def test_prompts_of_two_paths_take_turns() -> None:
    core = batcher(step_tokens=4)
    whole = [one(name, WHOLE, 40) for name in ("w1", "w2")]
    queue(core, *whole, one("two", TWO, 40), one("decode", TWO))
    chunks = []
    for _ in range(6):
        work = take(core)
        chunks.append([key for key, _, count in rows(work) if count > 1])
        for command in run(core, work):
            if isinstance(command, Send) and isinstance(command.message, Forward):
                back = tuple((row.sequence, (1,)) for row in command.message.rows)
                core.received(Sampled(command.message.batch, back))
    assert chunks == [["two#1"], ["w1#1"]] * 3


def test_only_the_row_that_completes_the_known_tokens_draws() -> None:
    core = batcher(step_tokens=4)
    queue(core, submit("r", WHOLE, prompt=(5, 6, 7), so_far=(8, 9)))
    (first,) = take(core)
    assert [(row.tokens, row.draw) for row in first.rows] == [((5, 6, 7, 8), None)]
    run(core, (first,))
    (second,) = take(core)[0].rows
    assert second.tokens == (9,)
    assert second.draw is not None
    assert second.draw.index == 2


def test_a_path_of_two_stages_has_two_even_micro_batches_in_flight() -> None:
    core = batcher(step_tokens=100)
    queue(core, *(one(f"r{i}", TWO) for i in range(5)))
    (first,), (second,) = take(core), take(core)
    assert [len(first.rows), len(second.rows)] == [3, 2]
    run(core, (first, second))
    assert not core.take()
    core.received(Sampled(first.batch, tuple((k, (1,)) for k in first.keys)))
    assert {row[0] for row in rows(take(core))} == set(first.keys)
    assert not core.take()


def test_a_sequence_that_joins_fills_a_micro_batch_that_is_free_but_no_further_one() -> None:
    core = batcher(step_tokens=100)
    for name in ("x", "y"):
        queue(core, one(name, TWO))
        assert rows(take(core)) == [(f"{name}#1", 0, 1)]
    queue(core, one("z", TWO))
    assert not core.take()


def test_an_answer_to_another_micro_batch_is_ignored() -> None:
    core = batcher()
    queue(core, one("r", TWO))
    work = take(core)
    run(core, work)
    batch = work[0].batch
    assert core.received(Sampled(batch + 1, (("r#1", (5,)),))) == []
    (out,) = core.received(Sampled(batch, (("r#1", (5,)),)))
    assert isinstance(out, Emit)
    assert core.received(Sampled(batch, (("r#1", (5,)),))) == []


def test_a_missing_token_fails_the_attempt() -> None:
    core = batcher()
    queue(core, one("r", TWO))
    work = take(core)
    run(core, work)
    commands = core.received(Sampled(work[0].batch, (("r#1", ()),)))
    assert [
        c.what.code for c in commands if isinstance(c, Emit) and isinstance(c.what, AttemptFailed)
    ] == ["protocol"]
    assert core.running == 0


def test_who_does_not_fit_the_kv_waits_and_who_would_wait_behind_is_refused() -> None:
    """Each will soon have the pages of its prompt and one more."""
    kv = FakeKv(kv_capacity=96)
    core = batcher(kv=kv, step_tokens=100)
    big = submit("big", WHOLE, prompt=(1,) * 30, max_tokens=60)
    more = submit("more", WHOLE, prompt=(1,) * 40, max_tokens=40)
    queue(core, big, more)
    with pytest.raises(CapacityExceeded, match="no KV cache left"):
        queue(core, one("small", WHOLE))
    assert rows(take(core)) == [("big#1", 0, 30)]
    kv.kv_used = 32
    assert not core.take()
    assert core.waiting == 1
    core.cancel(_cancel_of(big))
    kv.kv_used = 0
    queue(core, one("small", WHOLE))
    assert [row[0] for row in rows(take(core))] == ["more#1", "small#1"]


def test_what_the_slots_do_not_take_is_refused_at_once() -> None:
    """Alone as many as there are; on paths by what a stage is of the model, for each model."""
    core = batcher(slots=2, kv=FakeKv(kv_capacity=10_000))
    other = msgspec.structs.replace(one("other", WHOLE), model_id=ModelId("other"))
    queue(core, one("a", WHOLE), one("b", WHOLE), other)
    with pytest.raises(CapacityExceeded, match="submit elsewhere"):
        queue(core, one("c", WHOLE))
    share = (TWO[0].stop - TWO[0].start) / BLOCKS / 2
    most = int(OVERFULL * 2 / share)
    queue(core, *(one(f"path-{i}", TWO) for i in range(most)))
    with pytest.raises(CapacityExceeded, match="submit elsewhere"):
        queue(core, one("d", TWO))
    again = msgspec.structs.replace(one("a", TWO), attempt=2)
    with pytest.raises(CapacityExceeded):
        queue(core, again)
    queue(core, msgspec.structs.replace(one("a", WHOLE), attempt=2))


def test_a_sequence_is_admitted_for_its_tokens_and_not_for_its_limit() -> None:
    core = batcher(kv=FakeKv(kv_capacity=96), slots=3)
    queue(core, *(submit(f"r{i}", WHOLE, prompt=(1,), max_tokens=90) for i in range(3)))
    assert len(rows(take(core))) == 3


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(CapacityExceeded, match=r"node\.kv_bytes"):
        queue(batcher(kv=FakeKv(kv_capacity=32)), submit("r", WHOLE, max_tokens=50))


def test_a_cached_prefix_is_not_run_again() -> None:
    core = batcher(kv=FakeKv(cached={"r#1": 16}), step_tokens=8)
    queue(core, one("r", WHOLE, 20))
    assert rows(take(core)) == [("r#1", 16, 4)]
    assert core.cancel(_cancel_of(one("r", WHOLE, 20))) == [Release(("r#1",))]


def test_a_path_of_several_stages_runs_the_whole_prompt() -> None:
    core = batcher(kv=FakeKv(cached={"r#1": 16}), step_tokens=8)
    queue(core, one("r", TWO, 20))
    assert rows(take(core)) == [("r#1", 0, 8)]


def test_what_was_found_cached_is_counted_once_a_sequence() -> None:
    core = batcher(kv=FakeKv(cached={"r#1": 16, "r#1~1": 32}), step_tokens=8)
    queue(core, one("r", WHOLE, 20))
    assert (core.prompt_tokens, core.cached_tokens) == (0, 0)
    queue(core, one("s", TWO, 5))
    (_, part) = take(core)
    assert (core.prompt_tokens, core.cached_tokens) == (25, 16)
    core.no_room(part, FULL)
    take(core)
    assert (core.prompt_tokens, core.cached_tokens) == (25, 16)


def test_the_first_token_says_what_was_found_cached() -> None:
    core = batcher(kv=FakeKv(cached={"r#1": 16}))
    queue(core, one("r", WHOLE, 20))
    emitted = [run(core, take(core)) for _ in range(2)]
    tokens = [c.what for commands in emitted for c in commands if isinstance(c, Emit)]
    assert [token.cached for token in tokens if isinstance(token, Token)] == [16, 0]


# --- preemption -------------------------------------------------------------

FULL = Failure("capacity", "full")


def test_the_last_that_began_is_preempted_and_begins_anew_with_its_tokens_so_far() -> None:
    core = batcher(step_tokens=8)
    queue(core, one("old", WHOLE, 2))
    run(core, take(core))
    queue(core, one("young", WHOLE, 3))
    run(core, take(core), token=9)
    (part,) = take(core)
    assert part.keys == ("old#1", "young#1")
    assert core.no_room(part, FULL) == [Release(("young#1",))]
    assert core.preemptions == 1
    assert core.live(part).keys == ("old#1",)
    assert core.waiting == 1
    run(core, (core.live(part),))
    (again,) = take(core)
    assert [(row.sequence, row.position, row.tokens) for row in again.rows] == [
        ("young#1~1", 0, (0, 1, 2, 9)),
        ("old#1", 4, (1,)),
    ]
    young = again.rows[0]
    assert young.draw is not None
    assert young.draw.index == 1


def test_a_preempted_sequence_goes_before_what_waits_and_keeps_its_age() -> None:
    kv = FakeKv(kv_capacity=40)
    core = batcher(step_tokens=8, kv=kv)
    for name in ("first", "second"):
        queue(core, one(name, WHOLE))
        run(core, take(core))
    kv.kv_used = 32
    queue(core, one("third", WHOLE))
    (part,) = take(core)
    core.no_room(part, FULL)
    kv.kv_used = 16
    run(core, (core.live(part),))
    (part,) = take(core)
    assert "second#1~1" in part.keys
    assert core.waiting == 1
    core.cancel(_cancel_of(one("first", WHOLE)))
    kv.kv_used = 0
    run(core, (core.live(part),))
    (part,) = take(core)
    assert sorted(part.keys) == ["second#1~1", "third#1"]
    assert core.no_room(part, FULL) == [Release(("third#1",))]


def test_on_a_path_preemption_frees_every_stage_and_tells_the_gateway() -> None:
    core = batcher()
    queue(core, one("old", WHOLE))
    take(core)
    young = one("young", THREE)
    queue(core, young)
    (part,) = take(core)
    assert core.no_room(part, FULL) == [
        Release(("young#1",)),
        Send("mem://b", Free(("young#1",))),
        Send("mem://c", Free(("young#1",))),
        Emit(young.gateway, AttemptFailed(young.request, 1, "capacity", "full")),
    ]
    assert core.received(Sampled(part.batch, (("young#1", (5,)),))) == []
    assert core.received(Failed(("young#1",), "not_found", "gone")) == []
    assert (core.running, core.waiting) == (1, 0)


def test_a_preempted_request_can_be_cancelled() -> None:
    core = batcher()
    queue(core, one("old", WHOLE), one("young", WHOLE))
    (part,) = take(core)
    core.no_room(part, FULL)
    assert core.cancel(_cancel_of(one("young", WHOLE))) == []
    assert core.waiting == 0


def test_a_followed_sequence_that_began_last_fails_at_its_leader_for_want_of_capacity() -> None:
    core = batcher()
    queue(core, one("led", WHOLE))
    (led,) = take(core)
    come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    assert core.no_room(led, FULL) == [
        Release(("x#1",)),
        Send("mem://c", Failed(("x#1",), "capacity", "full")),
    ]
    assert core.live(led).keys == ("led#1",)


def test_a_row_waits_for_its_grammar_and_others_of_its_batch_do_not() -> None:
    core = batcher()
    draws = [
        Draw(0, Sampling(), Context((1,), 1, (), rules))
        for rules in (RULED, LogitRules(min_tokens=1))
    ]
    given = [Row(f"{name}#1", 0, 1, 9, draw=draw) for name, draw in zip("gp", draws, strict=True)]
    (asked,) = come(core, forward(FROM_C, *given), Named("hidden"))
    assert isinstance(asked, Prepare)
    assert (asked.model_id, asked.sequence, asked.context) == (MODEL, "g#1", draws[0].context)
    assert rows(take(core)) == [("p#1", 0, 1)]
    assert core.take() == ()
    assert core.prepared("g#1") == []
    (part,) = take(core)
    assert (part.keys, part.batch, part.offsets) == (("g#1",), 1, (0,))


def test_a_stage_before_the_last_makes_no_grammar() -> None:
    core = batcher()
    path = Path(MODEL, stages(("c", 0, 2), ("a", 2, 4), ("b", 4, BLOCKS)))
    draw = Draw(0, Sampling(), Context((1,), 1, (), RULED))
    assert come(core, forward(path, Row("g#1", 0, 1, 9, draw=draw))) == []
    assert rows(take(core)) == [("g#1", 0, 1)]


def test_a_followed_grammar_that_cannot_be_made_fails_at_its_leader() -> None:
    core = batcher()
    draw = Draw(0, Sampling(), Context((1,), 1, (), RULED))
    come(core, forward(FROM_C, Row("g#1", 0, 1, 9, draw=draw), Row("p#1", 0, 1, 9)))
    assert core.prepared("g#1", Failure("bad_input", "no")) == [
        Release(("g#1",)),
        Send(FROM_C.leader, Failed(("g#1",), "bad_input", "no")),
    ]
    assert rows(take(core)) == [("p#1", 0, 1)]


def test_a_followed_sequence_that_ends_needs_its_grammar_no_more() -> None:
    core = batcher()
    draw = Draw(0, Sampling(), Context((1,), 1, (), RULED))
    come(core, forward(FROM_C, Row("g#1", 0, 1, 9, draw=draw)))
    assert core.running == 1
    assert core.received(Free(("g#1",))) == [Release(("g#1",))]
    assert core.running == 0


def test_a_followed_sequence_that_began_first_goes_on() -> None:
    core = batcher()
    come(core, forward(FROM_C, Row("x#1", 0, 1, 9)))
    followed = take(core)
    queue(core, one("led", WHOLE))
    take(core)
    assert core.no_room(followed[0], FULL) == [Release(("led#1",))]
    assert core.live(followed[0]).keys == ("x#1",)


def test_a_followed_image_may_be_longer_than_the_kv_cache() -> None:
    core = batcher(kv=FakeKv(kv_capacity=32, without={MODEL}))
    assert come(core, forward(FROM_C, Row("x#1", 0, 33, 33))) == []
    assert rows(take(core)) == [("x#1", 0, 33)]


def test_images_have_no_kv_to_give_back() -> None:
    seeing = ModelId("seeing")
    core = batcher(step_tokens=64, kv=FakeKv(without={seeing}))
    queue(core, one("text", WHOLE))
    (text,) = take(core)
    come(core, forward(Path(seeing, FROM_C.stages), Row("followed#1", 0, 9, 9)))
    queue(core, msgspec.structs.replace(picture("led", WHOLE, 9), model_id=seeing))
    assert {row[0] for row in rows(take(core))} == {"followed#1", "led#1"}
    told = core.no_room(text, FULL)[-1]
    assert isinstance(told, Emit)
    assert isinstance(told.what, AttemptFailed)
    assert told.what.request == "text"
    assert core.running == 2


def test_what_does_not_fit_alone_fails() -> None:
    core = batcher()
    queue(core, one("r", WHOLE))
    (part,) = take(core)
    released, told = core.no_room(part, FULL)
    assert core.preemptions == 0
    assert released == Release(("r#1",))
    assert isinstance(told, Emit)
    assert isinstance(told.what, AttemptFailed)
    assert told.what.code == "capacity"


def test_the_end_of_a_sequence_frees_it_at_every_stage_that_may_know_it() -> None:
    core = batcher()
    started, asks, waiting = one("started", THREE), one("asks", THREE), one("waiting", WHOLE)
    queue(core, started, waiting)
    assert core.cancel(_cancel_of(waiting)) == []
    ask(core, asks)
    assert core.cancel(_cancel_of(asks)) == [
        Send("mem://b", Free(("asks#1",))),
        Send("mem://c", Free(("asks#1",))),
    ]
    take(core)
    assert core.cancel(_cancel_of(started)) == [
        Release(("started#1",)),
        Send("mem://b", Free(("started#1",))),
        Send("mem://c", Free(("started#1",))),
    ]
    assert core.cancel(_cancel_of(started)) == []


def _cancel_of(message: Submit) -> Cancel:
    return Cancel(request=message.request, attempt=message.attempt)


# --- speculation ------------------------------------------------------------

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
    core._leader.running["r#1"].submit = submit("r", WHOLE, prompt=LOOP, stop_ids=(2,))
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
        assert come(core, forward(FROM_C, proposing(1 + accepted), batch=2)) == []
    for wrong in (0, 4):
        core = batcher()
        come(core, forward(FROM_C, proposing(0)))
        (_, told) = come(core, forward(FROM_C, proposing(wrong), batch=2))
        assert isinstance(told, Send)
        assert isinstance(told.message, Failed)


# --- following --------------------------------------------------------------


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


def test_keys_name_an_attempt() -> None:
    message = submit("r", WHOLE, attempt=3)
    assert sequence_key(message.request, message.attempt) == "r#3"
