"""Sequences whose KV comes from host memory."""

from services.node.core.batching import Batcher
from services.node.core.kv import Restoration
from services.node.core.microbatches import Emit, Release, Weighed
from shared.messages.serving import Token
from tests.support.submits import THREE, WHOLE
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

WORTH, DEAR = Restoration(32, 0.1, 0.2), Restoration(32, 0.2, 0.1)


def weighed(core: Batcher) -> list[tuple[str, bool]]:
    """What is told with the next portion."""
    told = core.restore()
    core.validate()
    return [(c.sequence, c.restoration.worth) for c in told if isinstance(c, Weighed)]


def test_it_runs_once_its_kv_has_come_and_others_run_meanwhile() -> None:
    kv = FakeKv(in_host={"new#1": WORTH}, restored={"new#1": [(16, True), (32, False)]})
    core = batcher(step_tokens=64, kv=kv)
    queue(core, one("old", WHOLE, 3))
    run(core, take(core))
    queue(core, one("new", WHOLE, 40))
    work = take(core)
    assert rows(work) == [("old#1", 3, 1)]
    run(core, work)
    assert core.restoring
    assert weighed(core) == [("new#1", True)]
    work = take(core)
    assert rows(work) == [("old#1", 4, 1)]
    run(core, work)
    assert weighed(core) == []
    assert not core.restoring
    assert sorted(rows(take(core))) == [("new#1", 32, 8), ("old#1", 5, 1)]
    assert core.restored_tokens == 32


def test_what_comes_from_host_memory_counts_as_cached() -> None:
    kv = FakeKv(
        cached={"r#1": 16}, in_host={"r#1": WORTH}, restored={"r#1": [(32, True), (48, False)]}
    )
    core = batcher(step_tokens=64, kv=kv)
    queue(core, one("r", WHOLE, 60))
    assert core.take() == ()
    weighed(core)
    weighed(core)
    (token,) = [command.what for command in run(core, take(core)) if isinstance(command, Emit)]
    assert isinstance(token, Token)
    assert token.cached == core.cached_tokens == 48
    assert (core.restored_tokens, core.prompt_tokens) == (32, 60)


def test_kv_that_is_faster_computed_is_computed() -> None:
    core = batcher(step_tokens=64, kv=FakeKv(in_host={"r#1": DEAR}))
    queue(core, one("r", WHOLE, 40))
    assert rows(take(core)) == [("r#1", 0, 40)]
    assert not core.restoring
    assert weighed(core) == [("r#1", False)]


def test_what_does_not_come_is_computed() -> None:
    kv = FakeKv(in_host={"r#1": WORTH}, restored={"r#1": [(0, False)]})
    core = batcher(step_tokens=64, kv=kv)
    queue(core, one("r", WHOLE, 40))
    assert core.take() == ()
    weighed(core)
    assert rows(take(core)) == [("r#1", 0, 40)]
    assert (core.restored_tokens, core.cached_tokens) == (0, 0)


def test_portions_go_to_the_sequence_that_began_first() -> None:
    kv = FakeKv(
        in_host={"a#1": WORTH, "b#1": WORTH},
        restored={"a#1": [(16, True), (32, False)], "b#1": [(32, False)]},
    )
    core = batcher(step_tokens=64, kv=kv)
    queue(core, one("a", WHOLE, 40), one("b", WHOLE, 40))
    assert core.take() == ()
    assert weighed(core) == [("a#1", True), ("b#1", True)]
    assert core.take() == ()
    weighed(core)
    work = take(core)
    assert rows(work) == [("a#1", 32, 8)]
    run(core, work)
    weighed(core)
    assert sorted(rows(take(core))) == [("a#1", 40, 1), ("b#1", 32, 8)]


def test_it_can_end_while_its_kv_comes() -> None:
    """Its pages are given back, though it has no positions yet."""
    kv = FakeKv(in_host={"r#1": WORTH}, restored={"r#1": [(0, True)]})
    core = batcher(kv=kv)
    queue(core, one("r", WHOLE, 40))
    assert core.take() == ()
    weighed(core)
    assert core.cancel(_cancel_of(one("r", WHOLE, 40))) == [Release(("r#1",))]
    assert not core.restoring
    assert weighed(core) == []


def test_a_preempted_sequence_gets_its_kv_back() -> None:
    kv = FakeKv(in_host={"young#1~1": WORTH}, restored={"young#1~1": [(32, False)]})
    core = batcher(step_tokens=64, kv=kv)
    queue(core, one("old", WHOLE, 2), one("young", WHOLE, 40))
    run(core, take(core), token=9)
    (part,) = take(core)
    assert core.no_room(part, FULL) == [Release(("young#1",))]
    run(core, (core.live(part),))
    run(core, take(core))
    assert weighed(core) == [("young#1~1", True)]
    assert sorted(rows(take(core))) == [("old#1", 4, 1), ("young#1~1", 32, 9)]
    assert core.restored_tokens == 32
    assert core.cached_tokens == 0, "the request's prompt was computed when it began"


def test_a_sequence_is_preempted_while_its_kv_comes() -> None:
    kv = FakeKv(in_host={"young#1": WORTH}, restored={"young#1": [(16, True)]})
    core = batcher(step_tokens=64, kv=kv)
    queue(core, one("old", WHOLE, 2))
    run(core, take(core))
    queue(core, one("young", WHOLE, 40))
    (part,) = take(core)
    weighed(core)
    assert core.no_room(part, FULL) == [Release(("young#1",))]
    core.validate()
    assert not core.restoring
    assert (core.running, core.waiting) == (1, 1)


def test_on_a_path_nothing_comes_from_host_memory() -> None:
    core = batcher(step_tokens=64, kv=FakeKv(in_host={"r#1": WORTH}))
    queue(core, one("r", THREE, 40))
    assert rows(take(core)) == [("r#1", 0, 40)]
