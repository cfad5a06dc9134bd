"""Which attempts a leader takes, by its slots, its KV and its prefix cache."""

import msgspec
import pytest

from services.node.core.microbatches import Emit, Release
from shared.errors import CapacityExceeded
from shared.ids import ModelId
from shared.messages.serving import Token
from shared.slots import OVERFULL
from tests.support.submits import BLOCKS, TWO, WHOLE, submit
from tests.unit.node.batching.builders import (
    FULL,
    FakeKv,
    _cancel_of,
    batcher,
    one,
    queue,
    rows,
    run,
    take,
)


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
