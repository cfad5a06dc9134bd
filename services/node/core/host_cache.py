"""What a node's host cache holds; pure.

The cache is memory beside the arena, for models that are not in use here. Its room is taken whole
before the first byte of a copy comes.

    step      from      to        legal if
    begin     (none)    filling   there is room for it
    complete  filling   whole
    give up   filling   (none)
    lend      whole     lent
    withdraw  lent      whole
    drop      whole     (none)

Filling: the bytes are on their way, and nobody reads them. Whole: the copy can be promoted to the
arena. Lent: peers may read it, too. Peers know one place of a block on a node, so a copy is lent
only while the arena has no space for the model. A lent copy is withdrawn before it is dropped. Any
step that is not in the table is a bug: IllegalTransition, with the model's story. A lack of room is
none: CapacityExceeded.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import CapacityExceeded
from shared.ids import ModelId
from shared.story import Story


class CacheState(enum.Enum):
    FILLING = "filling"
    WHOLE = "whole"
    LENT = "lent"


STEPS: Mapping[CacheState | None, frozenset[CacheState | None]] = {
    None: frozenset({CacheState.FILLING}),
    CacheState.FILLING: frozenset({CacheState.WHOLE, None}),
    CacheState.WHOLE: frozenset({CacheState.LENT, None}),
    CacheState.LENT: frozenset({CacheState.WHOLE}),
}
"""From the state of a model's copy, None where there is none, to those that may follow."""


@dataclass(slots=True)
class _Copy:
    nbytes: int
    state: CacheState


class CacheBook:
    """Which copies there are, and the room that they take."""

    def __init__(self, nbytes: int, story: Story) -> None:
        self.nbytes = nbytes
        self._story = story
        self._copies: dict[ModelId, _Copy] = {}

    @property
    def free(self) -> int:
        return self.nbytes - sum(copy.nbytes for copy in self._copies.values())

    def state(self, model: ModelId) -> CacheState | None:
        copy = self._copies.get(model)
        return None if copy is None else copy.state

    @property
    def whole(self) -> list[ModelId]:
        """The models that can be promoted, by id."""
        return sorted(m for m, c in self._copies.items() if c.state is not CacheState.FILLING)

    def begin(self, model: ModelId, nbytes: int) -> None:
        """CapacityExceeded: nothing was changed."""
        self._check(model, CacheState.FILLING)
        if nbytes > self.free:
            raise CapacityExceeded(
                f"{nbytes} bytes are wanted, {self.free} of the host cache's {self.nbytes} are free"
            )
        self._copies[model] = _Copy(nbytes, CacheState.FILLING)

    def complete(self, model: ModelId) -> None:
        self._step(model, CacheState.FILLING, CacheState.WHOLE)

    def give_up(self, model: ModelId) -> None:
        self._step(model, CacheState.FILLING, None)

    def lend(self, model: ModelId) -> None:
        self._step(model, CacheState.WHOLE, CacheState.LENT)

    def withdraw(self, model: ModelId) -> None:
        self._step(model, CacheState.LENT, CacheState.WHOLE)

    def drop(self, model: ModelId) -> None:
        self._step(model, CacheState.WHOLE, None)

    def _step(self, model: ModelId, before: CacheState, after: CacheState | None) -> None:
        if self.state(model) is not before:
            raise self._illegal(model, after)
        self._check(model, after)
        if after is None:
            del self._copies[model]
        else:
            self._copies[model].state = after

    def _check(self, model: ModelId, after: CacheState | None) -> None:
        if after not in STEPS[self.state(model)]:
            raise self._illegal(model, after)

    def _illegal(self, model: ModelId, after: CacheState | None) -> Exception:
        before = self.state(model)
        named = [state.value if state else "no" for state in (before, after)]
        return self._story.illegal(model, f"from {named[0]} copy in the host cache to {named[1]}")

    def validate(self) -> None:
        """For tests. AssertionError: no steps lead here."""
        assert self.free >= 0
        assert all(copy.nbytes > 0 for copy in self._copies.values())
