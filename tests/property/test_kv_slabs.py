"""Memory for KV among models: whatever they do, each gets its share, and no more lies idle than is
kept for models to begin with."""

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.node.core.kv_slabs import Slabs
from shared.ids import ModelId
from tests.support.amounts import examples

COUNT = 24
NAMES = [ModelId(name) for name in "abcd"]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(COUNT)
        self.open: set[ModelId] = set()
        self.wanted: dict[ModelId, int] = {}

    @rule(model=st.sampled_from(NAMES), weight=st.integers(1, 9))
    def open_model(self, model: ModelId, weight: int) -> None:
        assume(model not in self.open)
        self.slabs.open(model, weight)
        self.open.add(model)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close_model(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(model)
        self.wanted.pop(model, None)
        for slab in self.slabs.of(model):
            if self.slabs.is_used(slab):
                self.slabs.end(slab)
        self.slabs.close(model)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), use=st.booleans())
    def take(self, data: st.DataObject, use: bool) -> None:
        model = data.draw(st.sampled_from(sorted(self.open)))
        self.grow(model, use)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        """A model takes all that it may: what others do not use, but for a part of their shares,
        and what they wait for within them."""
        model = data.draw(st.sampled_from(sorted(self.open)))
        grown = False
        while self.grow(model):
            grown = True
        others = self.open - {model}
        least = COUNT - sum(map(self.left_to, others))
        assert len(self.slabs.of(model)) >= least, "memory that nobody needs lies idle"
        assert not grown or len(self.slabs.of(model)) == least, "it took what another waits for"

    def left_to(self, model: ModelId) -> int:
        share, used = self.slabs.share(model), self.used(model)
        return max(1, share // 8, used, min(share, used + self.wanted.get(model, 0)))

    def used(self, model: ModelId) -> int:
        return sum(map(self.slabs.is_used, self.slabs.of(model)))

    def grow(self, model: ModelId, use: bool = True) -> bool:
        """One more slab, if the model may have one: then there is one."""
        if self.slabs.takeable(model) <= 0:
            assert self.slabs.take(model) is None
            return False
        slab = self.slabs.take(model)
        if slab is None:
            found = self.slabs.unused(model)
            assert found is not None, "a slab may be taken, and there is none"
            owner, slabs = found
            assert owner != model
            self.slabs.give(slabs[0])
            slab = self.slabs.take(model)
        assert slab is not None
        if use:
            self.slabs.begin(slab)
        return True

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(sorted(self.open)))
        used = [slab for slab in self.slabs.of(model) if self.slabs.is_used(slab)]
        assume(used)
        self.finish(data.draw(st.sampled_from(used)))

    def finish(self, slab: int) -> None:
        self.slabs.end(slab)
        if self.slabs.is_leaving(slab):
            self.slabs.give(slab)

    @rule(wanted=st.dictionaries(st.sampled_from(NAMES), st.integers(0, COUNT)))
    def want(self, wanted: dict[ModelId, int]) -> None:
        self.wanted = {model: slabs for model, slabs in wanted.items() if model in self.open}
        self.vacate()

    def vacate(self) -> None:
        vacated = self.slabs.want(self.wanted)
        for owner in {self.slabs.owner(slab) for slab in vacated}:
            assert owner is not None
            stays = [s for s in self.slabs.of(owner) if not self.slabs.is_leaving(s)]
            assert len(stays) >= self.slabs.share(owner), "it gives more than it has borrowed"
        for slab in vacated:
            if not self.slabs.is_used(slab):
                self.slabs.give(slab)

    @invariant()
    def all_is_accounted_for(self) -> None:
        self.slabs.validate()
        assert all(self.slabs.share(model) >= 1 for model in self.open)

    def teardown(self) -> None:
        """Whoever waits has its share once the slabs that leave were used to their ends."""
        if not self.open:
            return
        waits = min(self.open)
        self.wanted = {waits: self.slabs.share(waits)}
        self.vacate()
        for slab in range(COUNT):
            if self.slabs.is_leaving(slab):
                self.finish(slab)
        while len(self.slabs.of(waits)) < self.slabs.share(waits):
            assert self.grow(waits), "a model that waits has less than its share"


TestSlabs = Machine.TestCase
TestSlabs.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
