"""A model's part of the KV cache: where the KV of its layers lies in the memory of all models."""

from dataclasses import dataclass, field

import torch

from services.node.core.kv import PAGE
from services.node.engine.kv_loan import KvLoan
from services.node.engine.pages import Pages


@dataclass(slots=True, eq=False)
class KvModel:
    """A model's part of the cache. `services.node.engine.kv` says how its pages lie."""

    memory: torch.Tensor
    """The memory of all models, in the model's data type."""
    layers: range
    """Those that a page has."""
    heads: tuple[int, int]
    """(KV heads, head_dim)"""
    pages: Pages
    page_bytes: int
    """The bytes of a page in all layers. 0: the model keeps no KV."""
    erased: bool
    form: str
    """What the bytes of its pages mean."""
    views: dict[range, torch.Tensor] = field(default_factory=dict)
    loans: set[KvLoan] = field(default_factory=set)

    def view(self, layers: range) -> torch.Tensor:
        """See `KvCache.of_layers`."""
        if layers not in self.views:
            self.views[layers] = self._made(layers)
        return self.views[layers]

    def _made(self, layers: range) -> torch.Tensor:
        heads, head_dim = self.heads
        slot = 2 * heads * head_dim
        if not slot:
            return self.memory.new_empty((len(layers), 0, 2, heads, head_dim))
        layer, all_slots = self.pages.per_slab * PAGE, self.memory.numel() // (PAGE * slot) * PAGE
        first = self.shift(layers) * PAGE
        return self.memory.as_strided(
            (len(layers), all_slots - first - (len(layers) - 1) * layer, 2, heads, head_dim),
            (layer * slot, slot, heads * head_dim, head_dim, 1),
            first * slot,
        )

    def shift(self, layers: range) -> int:
        """How many pieces after a page's first one its part of the first of these layers lies."""
        return (layers.start - self.layers.start) * self.pages.per_slab

    def parts(self, layers: range) -> int:
        """Into how many parts a page is divided for sequences that have KV in these layers."""
        return len(self.layers) // len(layers) if layers else 1
