"""Which model has which part of a node's memory for KV.

The memory is cut into slabs of one size. A slab belongs to one model at a time, or to none, and
holds pages of that model alone. So models whose positions differ in size share the memory, and how
much each of them has follows its load.

Every open model has a *share* of the slabs, by its weight. A model that needs more than its share
borrows what others do not use, except for a small part of each one's share, so that every model can
always begin something. If a model below its share lacks slabs, models above theirs *vacate* some:
nothing new is put into these, and they change hands when their last sequences end. This is max-min
fair: what one model does not need is divided among the others, and nobody runs out below its share.
"""

from collections import Counter
from collections.abc import Mapping

from shared.errors import CapacityExceeded
from shared.ids import ModelId

KEPT = 1 / 8
"""The part of a model's share that others do not borrow while it is idle. At least one slab."""
NOTHING: Mapping[ModelId, int] = {}


class Slabs:
    def __init__(self, count: int) -> None:
        self.count = count
        self._weights: dict[ModelId, int] = {}
        self._owners: dict[int, ModelId] = {}
        self._free = set(range(count))
        self._owned: Counter[ModelId] = Counter()
        """How many slabs each model has, and in `_used` how many of them sequences use."""
        self._used: Counter[ModelId] = Counter()
        self._pages: Counter[int] = Counter()
        """For each slab, how many pages of it sequences use."""
        self._leaving: set[int] = set()
        self._wanted: Mapping[ModelId, int] = NOTHING

    def open(self, model: ModelId, weight: int) -> None:
        """Gives the model a share. CapacityExceeded if each open model could not have a slab."""
        if len(self._weights) >= self.count:
            raise CapacityExceeded(
                f"the memory for KV caches is divided among {self.count} models already: close one"
            )
        self._weights[model] = weight

    def close(self, model: ModelId) -> None:
        """The model's sequences have ended."""
        for slab in self.of(model):
            self.give(slab)
        self._weights.pop(model, None)

    def of(self, model: ModelId) -> list[int]:
        return [slab for slab, owner in self._owners.items() if owner == model]

    def owner(self, slab: int) -> ModelId | None:
        return self._owners.get(slab)

    def share(self, model: ModelId) -> int:
        """The slabs that the model gets while all models need more than they have. 0: not open."""
        if model not in self._weights:
            return 0
        spare = self.count - len(self._weights)
        return 1 + spare * self._weights[model] // sum(self._weights.values())

    def takeable(self, model: ModelId, promised: Mapping[ModelId, int] = NOTHING) -> int:
        """How many more slabs the model may take now. `promised`: slabs that others will soon need
        for sequences that have begun. Below 0: others should have some of what it has."""
        others = sum(
            self._kept(other, promised.get(other, 0)) for other in self._weights if other != model
        )
        return self.count - self._owned[model] - others

    def _kept(self, model: ModelId, promised: int) -> int:
        """The slabs that nobody else may take."""
        share = self.share(model)
        used = self._used[model] + promised
        return max(int(share * KEPT), 1, used, min(share, used + self._wanted.get(model, 0)))

    def take(self, model: ModelId) -> int | None:
        """Gives the model a slab that belongs to nobody, if there is one that it may take."""
        if not self._free or self.takeable(model) <= 0:
            return None
        slab = min(self._free)
        self._free.remove(slab)
        self._owners[slab] = model
        self._owned[model] += 1
        return slab

    def unused(self, model: ModelId) -> tuple[ModelId, list[int]] | None:
        """Slabs of another model, of which this one may take one once nothing is cached in it."""
        if self.takeable(model) <= 0:
            return None
        others = [m for m in self._weights if m != model and self._used[m] < self._owned[m]]
        if not others:
            return None
        loser = max(others, key=self._excess)
        return loser, [slab for slab in self.of(loser) if not self._pages[slab]]

    def give(self, slab: int) -> None:
        """The slab belongs to nobody any more."""
        model = self._owners.pop(slab)
        self._owned[model] -= 1
        self._used[model] -= self._pages.pop(slab, 0) > 0
        self._leaving.discard(slab)
        self._free.add(slab)

    def begin(self, slab: int) -> None:
        """One more page is used."""
        self._used[self._owners[slab]] += not self._pages[slab]
        self._pages[slab] += 1

    def end(self, slab: int) -> None:
        """One page less is used."""
        self._pages[slab] -= 1
        self._used[self._owners[slab]] -= not self._pages[slab]

    def is_used(self, slab: int) -> bool:
        return self._pages[slab] > 0

    def is_leaving(self, slab: int) -> bool:
        return slab in self._leaving

    def want(self, wanted: Mapping[ModelId, int]) -> list[int]:
        """`wanted`: how many slabs more than they have models need. Returns the slabs that have to
        be vacated now, for models that are below their shares: all of it or as much as the share
        allows."""
        self._wanted = wanted
        missing = sum(map(self._claim, self._weights)) - self.count
        vacated: list[int] = []
        while len(vacated) < missing:
            losers = [m for m in self._weights if self._excess(m) > 0 and self._staying(m)]
            if not losers:
                break
            slabs = self._staying(max(losers, key=self._excess))
            vacated.append(min(slabs, key=self._pages.__getitem__))
            self._leaving.add(vacated[-1])
        return vacated

    def _claim(self, model: ModelId) -> int:
        """The slabs that the model will have, if each one that waits gets its share."""
        share, wanted = self.share(model), self._wanted.get(model, 0)
        due = min(share, self._owned[model] + wanted) if wanted else max(int(share * KEPT), 1)
        return max(due, len(self._staying(model)))

    def _staying(self, model: ModelId) -> list[int]:
        """The model's slabs that sequences use, and that it does not vacate."""
        slabs = self.of(model)
        return [slab for slab in slabs if self._pages[slab] and slab not in self._leaving]

    def _excess(self, model: ModelId) -> int:
        """How many slabs the model has beyond its share, less those that it vacates."""
        going = sum(1 for slab in self._leaving if self._owners[slab] == model)
        return self._owned[model] - going - self.share(model)

    def validate(self) -> None:
        """For tests. AssertionError: what is kept here cannot be."""
        assert set(self._owners.values()) <= set(self._weights), "a slab of a closed model"
        assert self._free | set(self._owners) == set(range(self.count)), "a slab is lost"
        assert not self._free & set(self._owners), "a slab is free and belongs to a model"
        assert self._leaving <= set(self._owners)
        assert all(pages >= 0 for pages in self._pages.values())
        used = {slab for slab, pages in self._pages.items() if pages}
        for model in self._weights:
            assert self._owned[model] == len(self.of(model))
            assert self._used[model] == len(used & set(self.of(model)))
        assert used <= set(self._owners)
        assert sum(map(self.share, self._weights)) <= self.count
