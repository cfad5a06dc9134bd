"""The scheduler's view of the KV cache of its node's engine."""

from collections.abc import Mapping
from typing import Protocol

from services.node.core.rows import SequenceKey
from shared.ids import ModelId

PAGE = 16
"""Positions of a page. KV is taken, shared and given back in whole pages."""


def pages_of(positions: int) -> int:
    return -(-positions // PAGE)


def whole_pages(positions: int) -> int:
    """The positions of all the pages that `positions` positions need."""
    return pages_of(positions) * PAGE


class Kv(Protocol):
    """Implemented by an engine. All numbers are positions of whole pages. The models that are open
    share the memory (kv_slabs.py says how)."""

    @property
    def kv_used(self) -> int:
        """Positions of pages that live sequences have. A shared page counts once. If models differ,
        these and `kv_capacity` are positions of the model that opened first."""

    @property
    def kv_capacity(self) -> int:
        """0 if no model that keeps KV is open."""

    def kv_share(self, model_id: ModelId) -> int:
        """Positions that the model can have however much other models need. 0: it is not open, or
        keeps no KV."""

    def kv_free(self, model_id: ModelId, promised: Mapping[ModelId, int]) -> int:
        """Positions that sequences of the model can still take, if those of other models take these
        numbers of positions more."""

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """`wanted`: for how many positions sequences of each model wait. Models that have more than
        their share let go of as much, when their sequences end. It holds until the next call."""

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        """Whether the model's sequences have KV in blocks start <= block < stop. Those of a model
        that has none in any block run whole, in one row. True if the model is not open."""

    def adopt(
        self, model_id: ModelId, key: SequenceKey, tokens: tuple[int, ...], limit: int
    ) -> int:
        """Starts a sequence, which must be run whole on this node, with the KV of the longest
        cached beginning of `tokens`, but never of all of them. Returns the number of its positions.
        0: nothing is cached, and the sequence is not known yet."""
