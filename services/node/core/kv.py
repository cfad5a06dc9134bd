"""What the scheduler knows of the KV cache of its node's engine."""

from typing import Protocol

from services.node.core.rows import SequenceKey
from shared.ids import ModelId

PAGE = 16
"""Positions of a page: KV is taken, shared and given back in whole pages."""


def pages_of(positions: int) -> int:
    return -(-positions // PAGE)


def whole_pages(positions: int) -> int:
    """Positions that the pages for so many have."""
    return pages_of(positions) * PAGE


class Kv(Protocol):
    """An engine implements it. In positions, whole pages always."""

    @property
    def kv_used(self) -> int:
        """Of the pages that live sequences have; one that several share counts once."""

    @property
    def kv_capacity(self) -> int:
        """0: no model that keeps KV is open."""

    def keeps(self, model_id: ModelId) -> bool:
        """Whether the model's sequences have KV: images have none, and any number of positions.
        True if it is not open."""

    def adopt(
        self, model_id: ModelId, key: SequenceKey, tokens: tuple[int, ...], limit: int
    ) -> int:
        """Starts a sequence, which must be run whole on this node, with the KV of the longest
        beginning of `tokens` that is cached, and never of all of them: the number of its
        positions. 0: nothing is cached, and the sequence is not known yet."""
