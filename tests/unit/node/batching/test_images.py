"""The scheduler's sequences that are images: they run whole, and need no KV."""

import msgspec

from services.node.core.microbatches import Emit, Forward, Path, Send
from services.node.core.rows import Row
from shared.ids import ModelId
from shared.messages.instances import Stage
from shared.messages.serving import AttemptFailed, Submit, Token
from tests.support.submits import MODEL, TWO, WHOLE, submit
from tests.unit.node.batching.builders import (
    FROM_C,
    FULL,
    FakeKv,
    batcher,
    come,
    forward,
    one,
    queue,
    rows,
    run,
    take,
)


def picture(name: str, path: tuple[Stage, ...], size: int) -> Submit:
    return submit(name, path, prompt=(0,) * size, max_tokens=1, image=b"pixels")


def test_images_go_whole_and_end_with_their_class() -> None:
    core = batcher(step_tokens=4, kv=FakeKv(without={MODEL}))
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
    core = batcher(step_tokens=4, kv=FakeKv(without={MODEL}))
    queue(core, picture("a", WHOLE, 6), picture("b", TWO, 6))
    assert rows(take(core)) == [("b#1", 0, 6)]
    queue(core, picture("c", TWO, 6))
    assert rows(take(core)) == [("a#1", 0, 6)]


def test_an_image_waits_for_no_kv() -> None:
    core = batcher(kv=FakeKv(kv_capacity=32, kv_used=32, without={MODEL}))
    queue(core, picture("a", WHOLE, 3))
    assert rows(take(core)) == [("a#1", 0, 3)]


def test_an_image_needs_no_kv_cache_at_all() -> None:
    core = batcher(kv=FakeKv(kv_capacity=0, without={MODEL}))
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
