"""The part of a node's next status about its holdings: what has changed lately, or everything."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.ids import ModelId
from shared.messages.pool import Holding

LATELY = 8
"""A status says what has changed in this many statuses, so that as many may be lost in a row."""
WHOLE_EVERY = 60
"""Every so many statuses one says everything, whether it was asked for or not."""


@dataclass(frozen=True, slots=True)
class Told:
    """Fields of NodeStatus."""

    seq: int
    since: int
    holdings: tuple[Holding, ...]
    dropped: tuple[ModelId, ...]


class Telling:
    def __init__(self) -> None:
        self._seq = 0
        self._held: dict[ModelId, tuple[Holding, ...]] = {}
        self._changed: dict[ModelId, int] = {}
        """The status that first said what is held of each model now."""

    def next(self, holdings: Iterable[Holding], *, whole: bool = False) -> Told:
        """`holdings`: all that is held now. `whole`: everything has to be said."""
        self._seq += 1
        held: dict[ModelId, tuple[Holding, ...]] = {}
        for holding in holdings:
            held[holding.model_id] = (*held.get(holding.model_id, ()), holding)
        for model in held.keys() | self._held.keys():
            if held.get(model) != self._held.get(model):
                self._changed[model] = self._seq
        self._held = held
        since = max(1, self._seq - 1 - LATELY)
        if whole or self._seq % WHOLE_EVERY == 1:
            every = tuple(holding for each in held.values() for holding in each)
            return Told(self._seq, 0, every, ())
        self._changed = {model: seq for model, seq in self._changed.items() if seq > since}
        named = [model for model in self._changed if model in held]
        return Told(
            self._seq,
            since,
            tuple(holding for model in named for holding in held[model]),
            tuple(model for model in self._changed if model not in held),
        )
