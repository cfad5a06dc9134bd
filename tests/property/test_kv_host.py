"""The host tier: whatever it is asked for, its memory is counted, what was used least recently goes
first, and KV is copied only where that takes less time than to compute it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.node.core.kv import EVICTED_TOGETHER, PAGE
from services.node.core.kv_host import (
    ASSUMED_BYTES_PER_S,
    COPIES,
    FEW,
    CopyRate,
    HostTier,
    PageKey,
    restoration,
)
from shared.ids import ModelId

NBYTES = 10
KEYS = st.tuples(st.sampled_from([ModelId("m"), ModelId("n")]), st.sampled_from([b"a", b"b", b"c"]))


class Machine(RuleBasedStateMachine):
    """The tier beside a list of its pages, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier[str](NBYTES)
        self.pages: list[tuple[PageKey, int]] = []

    @rule(key=KEYS, nbytes=st.integers(1, NBYTES + 2))
    def keep(self, key: PageKey, nbytes: int) -> None:
        if self.tier.find(key) is not None:
            return
        made: list[str] = []

        def make() -> str:
            assert self.tier.used + nbytes <= NBYTES, "memory is taken before others have gone"
            made.append(f"{key} {nbytes}")
            return made[0]

        kept = self.tier.keep(key, nbytes, make)
        if nbytes > NBYTES:
            assert (kept, made) == (None, [])
            return
        assert [kept] == made
        while sum(size for _, size in self.pages) + nbytes > NBYTES:
            self.pages.pop(0)
        self.pages.append((key, nbytes))

    @rule(key=KEYS)
    def fail(self, key: PageKey) -> None:
        """There is no memory for the page: the account stays right."""
        if self.tier.find(key) is None:
            with pytest.raises(MemoryError):
                self.tier.keep(key, 1, self.no_memory)
            while sum(size for _, size in self.pages) >= NBYTES:
                self.pages.pop(0)

    def no_memory(self) -> str:
        raise MemoryError

    @rule(keys=st.lists(KEYS, max_size=4))
    def touch(self, keys: list[PageKey]) -> None:
        self.tier.touch(keys)
        for key in keys:
            found = [page for page in self.pages if page[0] == key]
            self.pages = [page for page in self.pages if page[0] != key] + found

    @invariant()
    def it_has_these_pages_and_no_others(self) -> None:
        self.tier.validate()
        assert self.tier.used == sum(size for _, size in self.pages)
        for model in ("m", "n"):
            for digest in (b"a", b"b", b"c"):
                key = ModelId(model), digest
                size = dict(self.pages).get(key)
                assert self.tier.find(key) == (None if size is None else f"{key} {size}")


TestHostTier = Machine.TestCase

SIZES = st.integers(1, 1 << 30)
TIMES = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(SIZES, TIMES), max_size=2 * COPIES), SIZES, TIMES)
def test_a_portion_takes_as_long_as_it_may_or_is_what_is_evicted_together(
    copies: list[tuple[int, float]], page: int, within_s: float
) -> None:
    rate = CopyRate()
    for nbytes, seconds in copies:
        rate.add(nbytes, seconds)
    recent = copies[-COPIES:]
    if len(recent) >= FEW:
        rates = sorted(nbytes / seconds for nbytes, seconds in recent)
        few = (len(rates) - 1) // 2
        assert rates[few] <= rate.bytes_per_s <= rates[-1 - few]
    else:
        assert rate.bytes_per_s == ASSUMED_BYTES_PER_S
    portion = rate.portion(page, within_s)
    assert portion == EVICTED_TOGETHER or portion * page <= rate.bytes_per_s * within_s * 1.001
    assert (portion + 1) * page > rate.bytes_per_s * within_s * 0.999


@given(st.integers(1, 1000), SIZES, st.floats(0, 1.0), SIZES, TIMES)
def test_kv_is_copied_if_that_takes_less_time_than_to_compute_it(
    pages: int, nbytes: int, token_s: float, copied: int, seconds: float
) -> None:
    rate = CopyRate()
    for _ in range(FEW):
        rate.add(copied, seconds)
    found = restoration(pages, nbytes, token_s, rate)
    assert found.positions == pages * PAGE
    assert found.compute_s == found.positions * token_s
    assert found.copy_s == nbytes / rate.bytes_per_s
    assert found.worth == (token_s == 0 or found.copy_s < found.compute_s)
