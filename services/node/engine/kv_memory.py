"""The memory in which KV lies, and what is written to it outside of steps."""

from collections.abc import Callable, Sequence

import torch

from services.node.core.kv import PAGE
from shared.ids import ModelId


class KvMemory:
    """In the methods, `kv` is the cache of some layers, see `KvCache.of_layers`."""

    def __init__(
        self, device: torch.device, allocate: Callable[[int], torch.Tensor] | None = None
    ) -> None:
        """`allocate`: where it comes from, if not from torch."""
        self._device = device
        self._allocate = allocate

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns uint8 [nbytes]. RuntimeError or CapacityExceeded: there is too little."""
        if self._allocate is not None:
            return self._allocate(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def erase(self, model: ModelId, kv: torch.Tensor, pages: Sequence[int]) -> None:
        """Writes zeros to these pages."""
        for page in pages:
            kv[:, page * PAGE : (page + 1) * PAGE] = 0

    def copy(
        self, model: ModelId, kv: torch.Tensor, source: Sequence[int], target: Sequence[int]
    ) -> None:
        """Copies as many pages as there are in `target`."""
        for layer in kv:
            paged = layer.unflatten(0, (-1, PAGE))
            paged[list(target)] = paged[list(source[: len(target)])]
