"""The KV cache's pages: what is read is what was written, and no page is lost or written twice."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.node.core.kv import EVICTED_TOGETHER, PAGE, whole_pages
from services.node.core.kv_host import CopyRate
from services.node.engine.budget import KvBudget
from services.node.engine.kv import KvCache
from services.node.engine.kv_host import CpuCopies, KvHost, Pair
from services.node.engine.kv_sequence import KvSequence, Run
from shared.errors import CapacityExceeded, NotFound
from shared.ids import ModelId
from tests.support.amounts import examples

MODEL, OTHER, THIRD = ModelId("m"), ModelId("other"), ModelId("third")
STAGE, LAYERS = (0, 3), range(6)
PAGE_BYTES = PAGE * len(LAYERS) * 2 * 2 * 4
WHOLE_MEMORY = 1 << 30


def cache(pages: int = 4) -> KvCache:
    kv = KvCache(pages * PAGE, torch.device("cpu"))
    open_model(kv, MODEL)
    return kv


def shared(pages: int, others: int = 1, host: KvHost | None = None) -> KvCache:
    """A cache of pages of MODEL, which is open, and so are `others`."""
    kv = KvCache(KvBudget(pages * PAGE_BYTES), torch.device("cpu"), host=host)
    for model_id in (MODEL, OTHER, THIRD)[: others + 1]:
        open_model(kv, model_id)
    return kv


def available(kv: KvCache, model_id: ModelId = MODEL) -> int:
    """Number of pages that the model can still take."""
    return kv.free_for(model_id) // PAGE


def open_model(kv: KvCache, model_id: ModelId) -> None:
    kv.open_model(model_id, LAYERS, n_kv_heads=1, head_dim=2, dtype=torch.float32, erased=True)


def start(kv: KvCache, key: str, layers: range = LAYERS, model_id: ModelId = MODEL) -> KvSequence:
    return kv.start(model_id, STAGE, layers, key, WHOLE_MEMORY)


def write(kv: KvCache, sequence: KvSequence, values: list[float], proposed: int = 0) -> None:
    """Puts a value at each of the next positions, as a step would."""
    first = sequence.length
    kv.extend(sequence, len(values), proposed)
    slots = sequence.slots(first, len(values))
    kv.of_layers(sequence.model_id, sequence.layers)[:, slots] = torch.tensor(values).view(
        1, -1, 1, 1, 1
    )


def read(kv: KvCache, sequence: KvSequence) -> torch.Tensor:
    """[layers, whole pages, ...] as attention reads it."""
    runs = sequence.runs(whole_pages(sequence.length))
    tensor = kv.of_layers(sequence.model_id, sequence.layers)
    return torch.cat([tensor[:, r.slot : r.slot + r.stop - r.first] for r in runs], dim=1)


def ran(kv: KvCache, key: str, tokens: list[int]) -> KvSequence:
    """A sequence whose KV for these tokens is there, and was kept."""
    sequence = start(kv, key)
    found = kv.adopt(sequence, tuple(tokens))
    write(kv, sequence, [float(token) for token in tokens[found:]])
    kv.keep(sequence, found, tokens[found:])
    return sequence


def cached(kv: KvCache, tokens: list[int]) -> int:
    """Positions that a request with these tokens and one more would find."""
    sequence = start(kv, "probe")
    found = kv.adopt(sequence, (*tokens, 0))
    kv.free(("probe",))
    return found


def pages(first: int, count: int) -> list[int]:
    """Tokens of so many pages, different from those of any other `first`."""
    return [first * 1000 + i for i in range(count * PAGE)]


def write_layers(kv: KvCache, sequence: KvSequence, values: list[float], layers: range) -> None:
    """As `write`, but another value in each layer."""
    first = sequence.length - len(values)
    slots = sequence.slots(first, len(values))
    for layer, view in zip(layers, kv.of_layers(sequence.model_id, layers), strict=True):
        view[slots] = torch.tensor(values).view(-1, 1, 1, 1) + layer


def test_pages_are_taken_as_a_sequence_grows() -> None:
    kv = cache(pages=4)
    sequence = start(kv, "a")
    assert kv.used == 0
    for length, used in ((1, 1), (16, 1), (17, 2), (48, 3)):
        kv.extend(sequence, length - sequence.length)
        assert kv.used == used * PAGE
    kv.free(("a", "unknown"))
    assert kv.used == 0


def test_the_budget_is_rounded_up_to_whole_pages() -> None:
    kv = KvCache(17, torch.device("cpu"))
    open_model(kv, MODEL)
    assert kv.capacity == kv.share(MODEL) == kv.longest(MODEL) == 2 * PAGE


def test_without_a_page_nothing_changes() -> None:
    kv = cache(pages=2)
    a, b = start(kv, "a"), start(kv, "b")
    write(kv, a, [1.0] * 16)
    write(kv, b, [2.0])
    with pytest.raises(CapacityExceeded, match=r"16 more .* 0 of 32 .* node\.kv_bytes"):
        kv.extend(a, 1)
    assert (a.length, len(a.pages)) == (16, 1)
    kv.free(("b",))
    write(kv, a, [3.0])
    assert read(kv, a)[0, :17, 0, 0, 0].tolist() == [1.0] * 16 + [3.0]


def test_stages_without_layers_cost_nothing() -> None:
    kv = cache(pages=1)
    sequence = start(kv, "a", layers=range(0))
    kv.extend(sequence, 500)
    assert (kv.used, sequence.length) == (0, 500)


def test_nothing_foreign_is_read() -> None:
    """Even a weight of 0 does not make a NaN harmless."""
    kv = cache(pages=4)
    write(kv, start(kv, "bad"), [float("nan")] * 64)
    kv.free(("bad",))
    good = start(kv, "good")
    for _ in range(40):
        write(kv, good, [1.0])
        assert read(kv, good).isfinite().all()


def test_sequences_that_grow_side_by_side_stay_in_one_piece() -> None:
    kv = cache(pages=64)
    grown = [start(kv, f"s{i}") for i in range(4)]
    for _ in range(8):
        for sequence in grown:
            kv.extend(sequence, PAGE)
    assert [len(s.runs(s.length)) for s in grown] == [1] * 4


def test_a_sequence_takes_the_pages_of_an_ended_one_in_few_pieces() -> None:
    """Once all memory holds what was cached, as it does before long."""
    kv = cache(pages=64)
    for i in range(4):
        ran(kv, f"s{i}", pages(i, 16))
        kv.free((f"s{i}",))
    assert available(kv) == 64
    late = start(kv, "late")
    for _ in range(EVICTED_TOGETHER):
        kv.extend(late, PAGE)
    assert len(late.runs(late.length)) <= 2


def test_runs_are_of_neighbours() -> None:
    sequence = KvSequence("a", MODEL, STAGE, LAYERS, 100, pages=[4, 5, 1, 2, 3])
    assert sequence.runs(80) == [Run(64, 0, 32), Run(16, 32, 80)]
    assert sequence.runs(48) == [Run(64, 0, 32), Run(16, 32, 48)]
    assert sequence.slots(30, 4) == [94, 95, 16, 17]


def test_only_what_was_proposed_is_taken_back_and_its_pages_stay() -> None:
    kv = cache(pages=4)
    sequence = start(kv, "a")
    write(kv, sequence, [1.0] * 18, proposed=3)
    for wrong in (14, 19):
        with pytest.raises(AssertionError):
            kv.truncate(sequence, wrong)
    kv.truncate(sequence, 15)
    assert (sequence.length, kv.used) == (15, 2 * PAGE)
    with pytest.raises(AssertionError):
        kv.truncate(sequence, 14)
    write(kv, sequence, [2.0, 3.0])
    assert kv.used == 2 * PAGE
    assert read(kv, sequence)[0, 14:17, 0, 0, 0].tolist() == [1.0, 2.0, 3.0]


# --- shared prefixes --------------------------------------------------------


def test_a_prefix_is_read_where_it_was_written_and_continued_elsewhere() -> None:
    kv = cache(pages=8)
    first = ran(kv, "first", [*pages(1, 2), 7, 8, 9])
    used = kv.used
    second = ran(kv, "second", [*pages(1, 2), 7, 8, 10])
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert kv.used == used + PAGE
    assert read(kv, first)[0, :35, 0, 0, 0].tolist() == [*map(float, pages(1, 2)), 7, 8, 9]
    assert read(kv, second)[0, :35, 0, 0, 0].tolist() == [*map(float, pages(1, 2)), 7, 8, 10]


def test_at_least_one_position_is_computed() -> None:
    kv = cache(pages=8)
    ran(kv, "a", pages(1, 2))
    for count, found in ((16, 0), (17, 16), (31, 16), (32, 16)):
        sequence = start(kv, "b")
        assert kv.adopt(sequence, tuple(pages(1, 2)[:count])) == found
        kv.free(("b",))


def test_only_full_pages_are_shared_and_only_of_the_same_tokens_before() -> None:
    kv = cache(pages=8)
    ran(kv, "a", pages(1, 2)[:-1])
    assert cached(kv, pages(1, 2)) == PAGE
    assert cached(kv, pages(1, 2)[PAGE:]) == 0
    assert cached(kv, [5, *pages(1, 2)[1:]]) == 0


def test_what_is_decoded_is_shared_too() -> None:
    kv = cache(pages=8)
    sequence = ran(kv, "a", pages(1, 1))
    for token in pages(2, 1):
        write(kv, sequence, [float(token)])
        kv.keep(sequence, sequence.length - 1, [token])
    assert cached(kv, pages(1, 1) + pages(2, 1)) == 2 * PAGE


def test_a_prefix_belongs_to_its_model() -> None:
    kv = shared(8)
    ran(kv, "a", pages(1, 1))
    other = start(kv, "b", model_id=OTHER)
    assert kv.adopt(other, (*pages(1, 1), 0)) == 0


def test_what_ended_stays_cached_and_the_least_recently_used_goes_first() -> None:
    kv = cache(pages=2 * EVICTED_TOGETHER)
    for name in (1, 2):
        ran(kv, f"s{name}", pages(name, EVICTED_TOGETHER))
        kv.free((f"s{name}",))
    assert kv.used == 0
    assert cached(kv, pages(1, EVICTED_TOGETHER)) == EVICTED_TOGETHER * PAGE
    kv.extend(start(kv, "new"), 1)
    assert cached(kv, pages(1, EVICTED_TOGETHER)) == EVICTED_TOGETHER * PAGE
    assert cached(kv, pages(2, EVICTED_TOGETHER)) == 0


def test_of_a_prefix_the_end_goes_first() -> None:
    kv = cache(pages=2 * EVICTED_TOGETHER)
    ran(kv, "a", pages(1, 2 * EVICTED_TOGETHER))
    kv.free(("a",))
    kv.extend(start(kv, "new"), 1)
    assert cached(kv, pages(1, 2 * EVICTED_TOGETHER)) == EVICTED_TOGETHER * PAGE


def test_of_two_that_computed_the_same_one_is_shared() -> None:
    kv = cache(pages=8)
    both = [start(kv, key) for key in "ab"]
    for sequence in both:
        write(kv, sequence, [1.0] * PAGE)
    for sequence in both:
        kv.keep(sequence, 0, [1] * PAGE)
    third = start(kv, "c")
    assert kv.adopt(third, (1,) * 17) == PAGE
    assert third.pages == both[0].pages
    kv.free(("a", "b", "c"))
    assert available(kv) == 8


def test_closing_a_model_frees_its_sequences_and_its_prefixes() -> None:
    kv = cache(pages=8)
    ran(kv, "a", pages(1, 2))
    ran(kv, "ended", pages(2, 1))
    kv.free(("ended",))
    kv.close_model(MODEL)
    assert (kv.used, kv.find("a")) == (0, None)
    with pytest.raises(NotFound):
        start(kv, "b")
    open_model(kv, MODEL)
    assert cached(kv, pages(1, 2)) == cached(kv, pages(2, 1)) == 0


def test_memory_that_cannot_be_had() -> None:
    kv = KvCache(1 << 20, torch.device("cpu"))
    with pytest.raises(CapacityExceeded, match=r"node\.kv_bytes"):
        kv.open_model(MODEL, range(1000), n_kv_heads=1000, head_dim=128, dtype=torch.float32)


# --- sequences that have KV in some layers ---------------------------------


def test_sequences_with_few_layers_share_a_page() -> None:
    kv = cache(pages=4)
    stages = [range(4, 6), range(4, 6), range(2, 4), range(4, 6), range(0, 2)]
    for number, layers in enumerate(stages):
        sequence = start(kv, f"s{number}", layers)
        kv.extend(sequence, PAGE)
        write_layers(kv, sequence, [100.0 * number] * PAGE, layers)
    assert [available(kv), kv.used] == [2, 2 * PAGE]
    for number, layers in enumerate(stages):
        found = kv.find(f"s{number}")
        assert found is not None
        for layer, got in zip(layers, read(kv, found), strict=True):
            assert (got == 100.0 * number + layer).all()
    kv.free(tuple(f"s{number}" for number in range(3)))
    assert available(kv) == 3
    kv.free(("s3", "s4"))
    assert available(kv) == 4
    kv.extend(start(kv, "whole"), 4 * PAGE)


def test_parts_of_pages_are_full_once_no_page_is_left_for_them() -> None:
    kv = cache(pages=2)
    kv.extend(start(kv, "whole"), PAGE)
    last = range(5, 6)
    assert kv.parts(MODEL, last) == len(LAYERS)
    for number in range(6):
        kv.extend(start(kv, f"s{number}", last), PAGE)
    late = start(kv, "late", last)
    with pytest.raises(CapacityExceeded):
        kv.extend(late, 1)
    kv.free(("s3",))
    kv.extend(late, 1)
    assert kv.free_for(MODEL) == 0


def test_promises_to_sequences_with_few_layers_take_parts() -> None:
    kv = cache(pages=4)
    kv.extend(start(kv, "s", range(2)), PAGE)
    assert kv.free_for(MODEL, {(MODEL, 3): 2 * PAGE}) == 3 * PAGE
    assert kv.free_for(MODEL, {(MODEL, 3): 3 * PAGE}) == 2 * PAGE
    assert kv.free_for(MODEL, {(MODEL, 3): PAGE, (MODEL, 2): PAGE}) == 2 * PAGE
    assert kv.free_for(MODEL, {(MODEL, 1): 5 * PAGE}) == -2 * PAGE


def test_a_sequence_that_runs_on_keeps_what_it_has() -> None:
    kv = cache(pages=6)
    other = start(kv, "other", range(2))
    sequence = start(kv, "s", range(1))
    for each, value in ((other, 7.0), (sequence, 3.0)):
        kv.extend(each, 20)
        write_layers(kv, each, [value] * 20, each.layers)
    for stop in range(2, 6):
        kv.run_on(sequence, stop, range(stop))
        write_layers(kv, sequence, [3.0] * 20, range(stop - 1, stop))
        for layer, got in zip(range(stop), read(kv, sequence), strict=True):
            assert (got[:20] == 3.0 + layer).all()
            assert got.isfinite().all()
    assert (read(kv, other)[:, :20, 0, 0, 0] == torch.tensor([[7.0], [8.0]])).all()
    assert kv.used == 3 * PAGE


@pytest.mark.parametrize("layers", [range(1), range(4)])
def test_a_sequence_that_runs_on_may_have_pages_for_tokens_that_were_taken_back(
    layers: range,
) -> None:
    """With layers 0 to 3 it keeps its pages, with layer 0 alone it takes larger parts."""
    kv = cache(pages=6)
    soiled = start(kv, "before")
    kv.extend(soiled, 6 * PAGE)
    kv.of_layers(MODEL, LAYERS)[:] = torch.nan
    kv.free(("before",))
    sequence = start(kv, "s", layers)
    kv.extend(sequence, 20)
    write_layers(kv, sequence, [3.0] * 20, layers)
    kv.extend(sequence, 2 * PAGE, proposed=2 * PAGE)
    kv.truncate(sequence, 20)
    kv.run_on(sequence, 5, LAYERS)
    write_layers(kv, sequence, [3.0] * 20, range(layers.stop, LAYERS.stop))
    for layer, got in enumerate(read(kv, sequence)):
        assert (got[:20] == 3.0 + layer).all()
        assert got[: 2 * PAGE].isfinite().all()


def test_without_room_to_run_on_nothing_changes() -> None:
    kv = cache(pages=1)
    sequence = start(kv, "s", range(2))
    kv.extend(sequence, PAGE)
    pages = list(sequence.pages)
    with pytest.raises(CapacityExceeded):
        kv.run_on(sequence, 5, range(5))
    assert (sequence.pages, sequence.parts, sequence.layers) == (pages, 3, range(2))


# --- several models ---------------------------------------------------------


def grow(kv: KvCache, key: str, pages: int, model_id: ModelId = MODEL) -> KvSequence:
    sequence = kv.find(key) or start(kv, key, model_id=model_id)
    kv.extend(sequence, pages * PAGE)
    return sequence


def test_a_model_borrows_what_the_other_does_not_use() -> None:
    """There are 8 slabs of 4 pages. Each model has a share of 4 slabs, and keeps 1 of them."""
    kv = shared(32)
    assert kv.share(MODEL) == kv.share(OTHER) == 16 * PAGE
    assert available(kv) == available(kv, OTHER) == 28
    grow(kv, "a", 28)
    assert available(kv) == 0
    assert available(kv, OTHER) == 4
    grow(kv, "b", 4, OTHER)
    kv.free(("a",))
    assert available(kv, OTHER) == 24


def test_a_model_below_its_share_gets_what_others_have_beyond_theirs_as_it_is_freed() -> None:
    kv = shared(32)
    for i in range(7):
        grow(kv, f"a{i}", 4)
    kv.make_room({OTHER: 12 * PAGE})
    assert (available(kv), available(kv, OTHER)) == (0, 4)
    for i in range(7):
        kv.free((f"a{i}",))
    assert available(kv) == 20  # what OTHER waits for is kept for it
    grow(kv, "b", 12, OTHER)
    kv.make_room({})
    assert (available(kv), available(kv, OTHER)) == (20, 16)


def test_nothing_new_goes_where_a_model_vacates() -> None:
    kv = shared(32)
    many = [grow(kv, f"a{i}", 1) for i in range(28)]
    kv.make_room({OTHER: 16 * PAGE})
    kv.free(tuple(sequence.key for sequence in many[::2]))
    free = available(kv)
    assert 0 < free < 14
    grow(kv, "a", free)
    kv.free(tuple(sequence.key for sequence in many))
    assert available(kv, OTHER) >= 16


def test_what_is_promised_to_others_is_not_free() -> None:
    kv = shared(32)
    assert kv.free_for(MODEL, {(OTHER, 1): 9 * PAGE}) == 20 * PAGE
    assert kv.free_for(MODEL, {(OTHER, 1): 1}) == 28 * PAGE


def test_prefixes_that_nobody_uses_give_way_to_a_model_below_its_share() -> None:
    kv = shared(32)
    ran(kv, "a", pages(1, 28))
    kv.free(("a",))
    assert cached(kv, pages(1, 28)) == 28 * PAGE
    grow(kv, "b", 16, OTHER)
    assert 0 < cached(kv, pages(1, 28)) <= 16 * PAGE


def test_an_open_model_takes_its_share_from_those_that_were_alone() -> None:
    kv = shared(32, others=0)
    grow(kv, "a", 32)
    assert kv.share(MODEL) == 32 * PAGE
    open_model(kv, OTHER)
    assert (kv.share(MODEL), kv.share(OTHER)) == (16 * PAGE, 16 * PAGE)
    assert available(kv, OTHER) == 0
    kv.make_room({OTHER: PAGE})
    kv.free(("a",))
    assert available(kv, OTHER) > 0
    kv.close_model(OTHER)
    assert kv.share(MODEL) == 32 * PAGE


def test_more_models_than_pieces_of_memory_are_refused() -> None:
    kv = shared(8)
    with pytest.raises(CapacityExceeded, match="divided among 2 models already"):
        open_model(kv, THIRD)


def test_a_page_that_no_piece_holds_is_refused() -> None:
    kv = shared(8, others=0)
    with pytest.raises(CapacityExceeded, match=r"raise node\.kv_bytes"):
        kv.open_model(OTHER, range(64), n_kv_heads=4, head_dim=8, dtype=torch.float32)


# --- whatever happens -------------------------------------------------------

PAGES = 24
PROMPTS = st.tuples(
    st.sampled_from([MODEL, MODEL, OTHER, OTHER]),
    st.lists(st.sampled_from([1, 2, 3]), max_size=4).map(
        lambda firsts: [token for first in firsts for token in pages(first, 1)]
    ),
    st.integers(1, 20),
)
"""(model, pages that others have too, tokens of its own)"""
STAGES = [range(0, 1), range(0, 2), range(2, 4), range(4, 6), range(5, 6), range(1, 6), range(3, 6)]
"""Layers of sequences that are not run whole here."""


def value_of(tokens: list[int]) -> float:
    """What a position holds depends on all tokens up to it, as KV does."""
    return float(hash(tuple(tokens)) % 65_521)


class FewPages(CopyRate):
    """A portion has two pages, or so many."""

    def __init__(self, pages: int = 2) -> None:
        super().__init__()
        self.pages = pages

    def portion(self, page: int, within_s: float = 0.0) -> int:
        return self.pages


class LateCopies(CpuCopies):
    """Copies are done as late as they may be, as on a GPU that has much to do: when the engine's
    stream waits for them."""

    pages = 2

    def __init__(self) -> None:
        self.rate = FewPages(self.pages)
        self._begun: list[Pair] = []

    def copy(self, pairs: Sequence[Pair]) -> bool:
        self._begun += pairs
        return False

    def settle(self) -> None:
        for target, source in self._begun:
            target.copy_(source)
        self._begun.clear()


class Machine(RuleBasedStateMachine):
    hosted = False
    """Whether there is a host tier."""

    @initialize(pages=st.integers(1, PAGES), late=st.booleans())
    def begin(self, pages: int, late: bool) -> None:
        self.host = None
        if self.hosted:
            self.host = KvHost(pages * PAGE_BYTES, torch.device("cpu"))
            self.host.copies = LateCopies() if late else CpuCopies()
            self.host.copies.rate = FewPages()
        self.kv = shared(PAGES, others=0, host=self.host)
        self.open_other()
        self.tokens: dict[str, list[int]] = {}
        self.coming: dict[str, list[int]] = {}
        """All tokens of sequences whose KV comes from host memory."""
        self.made = 0

    @rule(prompt=PROMPTS)
    def begin_one(self, prompt: tuple[ModelId, list[int], int]) -> None:
        model_id, shared, own = prompt
        self.made += 1
        tokens = [*shared, *range(own)]
        sequence = start(self.kv, f"s{self.made}", model_id=model_id)
        found = self.kv.adopt(sequence, tuple(tokens))
        assert found < len(tokens)
        if self.kv.restorable(sequence, tuple(tokens)):
            self.coming[sequence.key] = tokens
            return
        self.tokens[sequence.key] = tokens[:found]
        self.check(sequence)
        self.run(sequence, tokens[found:])

    @precondition(lambda self: self.coming)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        sequence = self.kv.find(key)
        assert sequence is not None
        before, more = sequence.length, self.kv.restore(sequence)
        assert before <= sequence.length < len(self.coming[key])
        if not more:
            tokens = self.coming.pop(key)
            if sequence.live:
                self.tokens[key] = tokens[: sequence.length]
                self.run(sequence, tokens[sequence.length :])
            assert sequence.live == (sequence.length > 0)

    @rule(
        model_id=st.sampled_from([MODEL, OTHER]),
        layers=st.sampled_from(STAGES),
        count=st.integers(1, 40),
    )
    def begin_a_stage(self, model_id: ModelId, layers: range, count: int) -> None:
        self.made += 1
        sequence = start(self.kv, f"s{self.made}", layers, model_id)
        self.tokens[sequence.key] = []
        self.run(sequence, list(range(count)))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(1, 3))
    def run_on(self, data: st.DataObject, more: int) -> None:
        sequence = self.kv.find(data.draw(st.sampled_from(sorted(self.tokens))))
        assert sequence is not None
        first, stop = sequence.layers.start, min(5, sequence.layers.stop + more)
        if stop <= sequence.layers.stop:
            return
        before, tokens = available(self.kv, sequence.model_id), self.tokens[sequence.key]
        new = range(sequence.layers.stop, stop)
        missing = self.kv.missing(sequence, sequence.model_id, range(first, stop), len(tokens))
        pages = {(sequence.model_id, missing[0]): missing[1] * PAGE}
        if sequence.parts != missing[0] and self.kv.free_for(sequence.model_id, pages) < 0:
            with pytest.raises(CapacityExceeded):
                self.kv.run_on(sequence, 9, range(first, stop))
            assert available(self.kv, sequence.model_id) == before
            return
        self.kv.run_on(sequence, 9, range(first, stop))
        values = [value_of(tokens[: i + 1]) for i in range(len(tokens))]
        view = self.kv.of_layers(sequence.model_id, new)
        view[:, sequence.slots(0, len(tokens))] = torch.tensor(values).view(1, -1, 1, 1, 1)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 40))
    def grow(self, data: st.DataObject, count: int) -> None:
        sequence = self.kv.find(data.draw(st.sampled_from(sorted(self.tokens))))
        assert sequence is not None
        self.run(sequence, list(range(count)))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), count=st.integers(1, 3), proposed=st.integers(1, 20))
    def speculate(self, data: st.DataObject, count: int, proposed: int) -> None:
        """Some of what was proposed is accepted; the rest is taken back."""
        sequence = self.kv.find(data.draw(st.sampled_from(sorted(self.tokens))))
        assert sequence is not None
        accepted = data.draw(st.integers(0, proposed))
        self.run(sequence, list(range(count + accepted)), proposed, proposed - accepted)

    @precondition(lambda self: self.tokens or self.coming)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.tokens | self.coming)))
        self.tokens.pop(key, None)
        self.coming.pop(key, None)
        self.kv.free((key,))

    @rule()
    def close_and_open_a_model(self) -> None:
        self.kv.close_model(OTHER)
        self.tokens = {key: tokens for key, tokens in self.tokens.items() if self.kv.find(key)}
        self.coming = {key: tokens for key, tokens in self.coming.items() if self.kv.find(key)}
        self.open_other()

    @rule(wanted=st.dictionaries(st.sampled_from([MODEL, OTHER]), st.integers(0, 200)))
    def wait(self, wanted: dict[ModelId, int]) -> None:
        self.kv.make_room(wanted)

    def open_other(self) -> None:
        """Its pages are larger, and do not fit into slabs without a rest."""
        self.kv.open_model(
            OTHER, LAYERS, n_kv_heads=1, head_dim=3, dtype=torch.float32, erased=True
        )

    def run(
        self, sequence: KvSequence, new: list[int], proposed: int = 0, refused: int = 0
    ) -> None:
        """A step: all or nothing, never a page that another reads, nor one that may be shared. The
        last `refused` of the positions are taken back."""
        tokens = self.tokens[sequence.key]
        free, had = available(self.kv, sequence.model_id), len(sequence.pages)
        ends = len(tokens) + len(new) + refused
        missing = self.kv.missing(sequence, sequence.model_id, sequence.layers, ends)
        assert missing == (sequence.parts, max(0, whole_pages(ends) // PAGE - had))
        model = self.kv._models[sequence.model_id]
        needed = model.pages.pages_for(missing[1], missing[0])
        all_tokens = tokens + new
        values = [value_of(all_tokens[: i + 1]) for i in range(len(tokens), len(all_tokens))]
        values += [1.0] * refused
        if needed > free:
            with pytest.raises(CapacityExceeded):
                self.kv.extend(sequence, len(values))
            assert (available(self.kv, sequence.model_id), len(sequence.pages)) == (free, had)
            return
        write(self.kv, sequence, values, proposed)
        slots = sequence.slots(len(tokens), len(values))
        written = {slot // PAGE + sequence.shift for slot in slots}
        readers = self.readers(sequence.model_id)
        assert all(readers[page] == 1 for page in written)
        assert not written & set(self.kv._models[sequence.model_id].pages._prefix_of)
        self.kv.truncate(sequence, len(all_tokens))
        if sequence.layers == LAYERS:
            self.kv.keep(sequence, len(tokens), new)
        self.tokens[sequence.key] = all_tokens

    def readers(self, model_id: ModelId) -> Counter[int]:
        live = [self.kv.find(key) for key in self.tokens | self.coming]
        mine = [s for s in live if s and s.model_id == model_id]
        return Counter(page + each.shift for each in mine for page in each.pages)

    def check(self, sequence: KvSequence) -> None:
        """What is read is what was written."""
        key = sequence.key
        tokens = self.tokens[key] if key in self.tokens else self.coming[key][: sequence.length]
        assert sequence.length == len(tokens)
        if tokens:
            got = read(self.kv, sequence)
            expected = torch.tensor([value_of(tokens[: i + 1]) for i in range(len(tokens))])
            assert (got[:, : len(tokens)] == expected.view(1, -1, 1, 1, 1)).all()
            assert got.isfinite().all()

    @invariant()
    def every_page_is_counted_once(self) -> None:
        self.kv._slabs.validate()
        for model_id, model in self.kv._models.items():
            readers, pages = self.readers(model_id), model.pages
            assert readers == pages.readers
            assert not set(pages._idle) & set(readers)
            assert {p: prefix for prefix, p in pages._page_of.items()} == pages._prefix_of
            slabs = set(self.kv._slabs.of(model_id))
            assert (
                {pages.slab_of(page) for page in readers} <= slabs == set(pages._slab_of.values())
            )

    @invariant()
    def what_is_read_is_what_was_written(self) -> None:
        for key in self.tokens | self.coming:
            sequence = self.kv.find(key)
            assert sequence is not None
            self.check(sequence)

    @precondition(lambda self: self.host)
    @rule()
    def step(self) -> None:
        assert self.host is not None
        self.host.begin_step()

    @invariant()
    def host_memory_is_counted(self) -> None:
        if self.host is not None:
            self.host.tier.validate()

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            self.kv.free(tuple(self.tokens | self.coming))
            self.kv.close_model(OTHER)
            assert not self.kv._models[MODEL].pages._divided
            whole = start(self.kv, "whole")
            self.kv.extend(whole, PAGES * PAGE)
            assert len(set(whole.pages)) == PAGES, "pages were lost"


TestPages = Machine.TestCase
TestPages.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


class HostMachine(Machine):
    """With memory for a few pages of what is evicted."""

    hosted = True


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
