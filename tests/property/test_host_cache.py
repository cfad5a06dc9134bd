"""The host cache's book: any steps, legal or not."""

import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.node.core.host_cache import STEPS, CacheBook, CacheState
from shared.errors import CapacityExceeded, IllegalTransition
from shared.ids import ModelId
from shared.story import Story

NBYTES = 100
MODELS = [ModelId(name) for name in "abcd"]
AFTER = {
    "complete": (CacheState.FILLING, CacheState.WHOLE),
    "give_up": (CacheState.FILLING, None),
    "lend": (CacheState.WHOLE, CacheState.LENT),
    "withdraw": (CacheState.LENT, CacheState.WHOLE),
    "drop": (CacheState.WHOLE, None),
}


class Book(RuleBasedStateMachine):
    """Beside the book, the sizes and states as they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.book = CacheBook(NBYTES, Story())
        self.sizes: dict[ModelId, int] = {}
        self.states: dict[ModelId, CacheState] = {}

    @rule(model=st.sampled_from(MODELS), nbytes=st.integers(1, NBYTES + 10))
    def begin(self, model: ModelId, nbytes: int) -> None:
        if model in self.states:
            with pytest.raises(IllegalTransition):
                self.book.begin(model, nbytes)
        elif sum(self.sizes.values()) + nbytes > NBYTES:
            with pytest.raises(CapacityExceeded, match=str(nbytes)):
                self.book.begin(model, nbytes)
        else:
            self.book.begin(model, nbytes)
            self.sizes[model], self.states[model] = nbytes, CacheState.FILLING

    @rule(model=st.sampled_from(MODELS), step=st.sampled_from(sorted(AFTER)))
    def step(self, model: ModelId, step: str) -> None:
        before, after = AFTER[step]
        legal = self.states.get(model) is before
        expected = contextlib.nullcontext() if legal else pytest.raises(IllegalTransition)
        with expected:
            getattr(self.book, step)(model)
        if legal and after is None:
            del self.sizes[model], self.states[model]
        elif legal and after is not None:
            self.states[model] = after

    @invariant()
    def the_book_says_what_is_there(self) -> None:
        self.book.validate()
        assert self.book.free == NBYTES - sum(self.sizes.values()) >= 0
        assert {m: self.book.state(m) for m in MODELS} == {m: self.states.get(m) for m in MODELS}
        whole = [m for m in MODELS if self.states.get(m) in (CacheState.WHOLE, CacheState.LENT)]
        assert self.book.whole == whole


TestBook = Book.TestCase


def test_every_step_of_the_table_is_a_call() -> None:
    calls = {(before, after) for before, after in AFTER.values()} | {(None, CacheState.FILLING)}
    assert calls == {(before, after) for before, afters in STEPS.items() for after in afters}
