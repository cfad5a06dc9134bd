"""Pages that go to host memory and come back: which ones, when, and what they hold."""

import pytest
import torch

from services.node.core.kv import PAGE, Restoration
from services.node.core.kv_host import AGAIN, ASSUMED_BYTES_PER_S, FEW, CopyRate
from services.node.engine import kv_host
from services.node.engine.kv import KvCache
from services.node.engine.kv_host import KvHost
from services.node.engine.kv_sequence import KvSequence
from shared.ids import ModelId
from tests.unit.node.engine.test_kv import (
    MODEL,
    PAGE_BYTES,
    FewPages,
    LateCopies,
    cached,
    pages,
    ran,
    read,
    shared,
    start,
    write,
)

CPU = torch.device("cpu")


def hosted(
    pages: int = 4, host: int = 100, late: bool = False, portion: int = 4
) -> tuple[KvCache, KvHost]:
    """A cache of `pages` pages, with host memory for `host` of them."""
    tier = KvHost(host * PAGE_BYTES, CPU)
    if late:
        tier.copies = LateCopies()
    tier.copies.rate = FewPages(portion)
    return shared(pages, others=0, host=tier), tier


def evict(kv: KvCache, key: str = "other") -> KvSequence:
    """Another sequence takes all pages, in steps of a page."""
    sequence = start(kv, key)
    while kv.free_for(MODEL) > 0:
        assert kv.host is not None
        kv.host.begin_step()
        write(kv, sequence, [-1.0] * PAGE)
    return sequence


def begin(kv: KvCache, key: str, tokens: list[int]) -> tuple[KvSequence, Restoration | None]:
    """A request with these tokens and one more begins."""
    sequence = start(kv, key)
    kv.adopt(sequence, (*tokens, 0))
    return sequence, kv.restorable(sequence, (*tokens, 0))


def values(kv: KvCache, sequence: KvSequence) -> list[float]:
    return read(kv, sequence)[0, : sequence.length, 0, 0, 0].tolist()


def gone(kv: KvCache, tokens: list[int]) -> None:
    """The KV of these tokens leaves the device."""
    ran(kv, "first", tokens)
    kv.free(("first",))
    evict(kv)
    kv.free(("other",))
    assert cached(kv, tokens) == 0


@pytest.mark.parametrize("late", [False, True])
def test_what_was_evicted_comes_back_in_portions(late: bool) -> None:
    kv, host = hosted(late=late)
    tokens = pages(1, 3)
    gone(kv, tokens)
    host.copies.rate = FewPages(2)
    assert (host.saved, host.tier.used) == (3, 3 * PAGE_BYTES)
    sequence, found = begin(kv, "again", tokens)
    assert found is not None
    assert (found.positions, found.worth) == (3 * PAGE, True)
    lengths, more = [], True
    while more:
        more = kv.restore(sequence)
        lengths.append(sequence.length // PAGE)
    assert lengths == ([0, 2, 3] if late else [2, 3])
    assert values(kv, sequence) == tokens
    assert host.restored == 3
    assert cached(kv, tokens) == 3 * PAGE, "others may share what has come back"


def test_only_what_the_device_lacks_is_copied() -> None:
    kv, host = hosted(pages=6)
    tokens = pages(1, 3)
    gone(kv, tokens)
    ran(kv, "beginning", tokens[:PAGE])
    sequence, found = begin(kv, "again", tokens)
    assert sequence.length == PAGE
    assert found is not None
    assert found.positions == 2 * PAGE
    while kv.restore(sequence):
        pass
    assert (values(kv, sequence), host.restored) == (tokens, 2)


def test_a_page_that_lies_in_host_memory_is_not_copied_there_again() -> None:
    kv, host = hosted()
    tokens = pages(1, 3)
    gone(kv, tokens)
    sequence, _ = begin(kv, "again", tokens)
    while kv.restore(sequence):
        pass
    kv.free(("again",))
    evict(kv)
    assert host.saved == 3


def test_two_sequences_get_the_same_pages_side_by_side() -> None:
    kv, host = hosted(pages=6)
    tokens = pages(1, 3)
    gone(kv, tokens)
    one, _ = begin(kv, "one", tokens)
    other, _ = begin(kv, "other", tokens)
    while kv.restore(one):
        pass
    kv.free(("one",))
    assert kv.used == 0
    while kv.restore(other):
        pass
    assert (values(kv, other), host.restored, kv.used) == (tokens, 3, 3 * PAGE)
    kv.free(("other",))
    kv._slabs.validate()


def test_a_sequence_ends_while_its_kv_comes_and_its_pages_are_free() -> None:
    """Nobody's KV is overwritten by a copy that was begun for a sequence that is over."""
    kv, _ = hosted(pages=2, late=True)
    tokens = pages(1, 2)
    gone(kv, tokens)
    sequence, _ = begin(kv, "again", tokens)
    assert kv.restore(sequence)
    kv.free(("again",))
    assert kv.used == 0
    heir = start(kv, "heir")
    write(kv, heir, [7.0] * 2 * PAGE)
    assert kv.host is not None
    kv.host.copies.settle()
    assert values(kv, heir) == [7.0] * 2 * PAGE


def test_without_a_page_the_rest_is_computed() -> None:
    kv, _ = hosted()
    tokens = pages(1, 3)
    gone(kv, tokens)
    write(kv, start(kv, "other"), [1.0] * 2 * PAGE)
    sequence, _ = begin(kv, "again", tokens)
    write(kv, start(kv, "another"), [1.0] * PAGE)
    while kv.restore(sequence):
        pass
    assert values(kv, sequence) == tokens[:PAGE]


def test_with_nothing_at_all_the_sequence_is_forgotten_and_begins_as_any_other() -> None:
    kv, host = hosted()
    tokens = pages(1, 3)
    gone(kv, tokens)
    sequence, _ = begin(kv, "again", tokens)
    other = evict(kv)
    assert not kv.restore(sequence)
    assert kv.find("again") is None
    assert kv.used == 4 * PAGE
    assert values(kv, other) == [-1.0] * 4 * PAGE
    assert host.restored == 0


def test_the_least_recently_used_prefix_leaves_host_memory_its_end_first() -> None:
    kv, host = hosted(host=3)
    old, new = pages(1, 2), pages(2, 2)
    for tokens in (old, new):
        gone(kv, tokens)
    assert host.tier.used == 3 * PAGE_BYTES
    for tokens, count in ((old, 1), (new, 2)):
        _, found = begin(kv, "again", tokens)
        assert found is not None
        assert found.positions == count * PAGE
        kv.free(("again",))


def test_what_comes_back_was_used_last() -> None:
    kv, _ = hosted(host=3)
    old, new = pages(1, 2), pages(2, 2)
    gone(kv, old)
    begin(kv, "again", old)
    kv.free(("again",))
    gone(kv, new[:PAGE])
    begin(kv, "again", old)
    kv.free(("again",))
    gone(kv, new)
    _, found = begin(kv, "again", old)
    assert found is not None
    assert found.positions == PAGE


def test_a_step_waits_for_one_portion_and_the_beginning_of_a_prefix_goes_into_it() -> None:
    kv, host = hosted(portion=2)
    tokens = pages(1, 4)
    ran(kv, "first", tokens)
    kv.free(("first",))
    host.begin_step()
    write(kv, start(kv, "other"), [1.0] * 4 * PAGE)
    assert host.saved == 2
    kv.free(("other",))
    _, found = begin(kv, "again", tokens)
    assert found is not None
    assert found.positions == 2 * PAGE


def test_nothing_more_is_saved_once_the_time_of_a_step_is_over() -> None:
    kv, host = hosted()
    tokens = pages(1, 4)
    ran(kv, "first", tokens)
    kv.free(("first",))
    host._left_s = 0.0
    write(kv, start(kv, "other"), [1.0] * PAGE)
    assert host.saved == 0


@pytest.mark.parametrize(
    ("token_s", "saved", "worth"), [(0.0, 3, True), (1e-12, 0, None), (1.0, 3, True)]
)
def test_kv_is_kept_if_copying_beats_computing(
    token_s: float, saved: int, worth: bool | None
) -> None:
    """As far as both are known."""
    kv, host = hosted()
    exhaust(host.copies.rate)
    host._token_s = lambda model_id: token_s
    tokens = pages(1, 3)
    gone(kv, tokens)
    _, found = begin(kv, "again", tokens)
    assert host.saved == saved
    assert (found and found.worth) == worth


def exhaust(rate: CopyRate) -> None:
    """No trial is due."""
    while rate.tries():
        pass


def test_where_copies_are_too_slow_a_few_are_tried_now_and_then() -> None:
    """Else they would be too slow for ever."""
    kv, host = hosted(pages=1, portion=4)
    host.copies.rate = rate = CopyRate()
    host._token_s = lambda model_id: 1e-12
    saved = [0]
    for number in range(FEW + AGAIN + FEW):
        ran(kv, f"{number}", pages(number, 1))
        kv.free((f"{number}",))
        host.begin_step()
        saved.append(host.saved)
    made = [number for number in range(1, len(saved)) if saved[number] > saved[number - 1]]
    assert len(made) == host.saved == 2 * FEW
    assert made[FEW] - made[FEW - 1] == AGAIN
    assert rate.bytes_per_s != ASSUMED_BYTES_PER_S


def test_a_trial_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_host, "TRIAL_BYTES", 2 * PAGE_BYTES)
    kv, host = hosted(portion=100)
    host._token_s = lambda model_id: 1e-12
    gone(kv, pages(1, 3))
    assert host.saved == 2


def test_kv_stays_away_once_the_engine_has_become_fast() -> None:
    kv, host = hosted()
    speed = {MODEL: 1.0}
    host._token_s = speed.__getitem__
    tokens = pages(1, 3)
    gone(kv, tokens)
    speed[MODEL] = 1e-12
    _, found = begin(kv, "again", tokens)
    assert found is not None
    assert not found.worth
    assert found.compute_s == pytest.approx(3 * PAGE * 1e-12)
    assert found.copy_s == pytest.approx(3 * PAGE_BYTES / host.copies.rate.bytes_per_s)


def test_a_model_that_is_opened_again_finds_its_prefixes() -> None:
    kv, _ = hosted()
    tokens = pages(1, 3)
    gone(kv, tokens)
    kv.close_model(MODEL)
    kv.open_model(MODEL, range(6), n_kv_heads=1, head_dim=2, dtype=torch.float32, erased=True)
    sequence, _ = begin(kv, "again", tokens)
    while kv.restore(sequence):
        pass
    assert values(kv, sequence) == tokens


def test_models_and_adapters_do_not_share_pages() -> None:
    kv, _ = hosted()
    tokens = pages(1, 3)
    gone(kv, tokens)
    adapted = kv.start(MODEL, (0, 3), range(6), "adapted", 1000, ModelId("adapter"))
    assert kv.restorable(adapted, (*tokens, 0)) is None
    other = ModelId("n")
    kv, host = hosted(pages=8)
    gone(kv, tokens)
    with pytest.raises(KeyError):
        kv._models[other]
    kv.close_model(MODEL)
    kv.open_model(other, range(6), n_kv_heads=1, head_dim=2, dtype=torch.float32, erased=True)
    assert kv.restorable(start(kv, "x", model_id=other), (*tokens, 0)) is None
    assert host.tier.used == 3 * PAGE_BYTES


def test_without_memory_of_the_machine_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kv, host = hosted()

    def none(like: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("cannot allocate memory")

    monkeypatch.setattr(host.copies, "memory", none)
    gone(kv, pages(1, 3))
    assert (host.saved, host.tier.used) == (0, 0)
