"""The scheduler's view of the KV cache of its node's engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.node.core.rows import SequenceKey
from shared.ids import NO_ADAPTER, ModelId

PAGE = 16
"""Positions of a page. KV is taken, shared and given back in whole pages."""

EVICTED_TOGETHER = 16
"""Pages evicted at a time. Those of one ended sequence are neighbours, so whoever takes them gets
one piece."""


def pages_of(positions: int) -> int:
    return -(-positions // PAGE)


def whole_pages(positions: int) -> int:
    """The positions of all the pages that `positions` positions need."""
    return pages_of(positions) * PAGE


Need = tuple[ModelId, int]
"""What a sequence takes: (its model, into how many parts a page is divided for it). See
`Kv.kv_parts`."""


Image = Any
"""The bytes of a copy: a memoryview of the host's memory, or a tensor of uint8 on the engine's
device (`torch` is not imported here)."""


class KvPages(Protocol):
    """Positions of one sequence's KV that are copied to another node, or from there. `read` and
    `fill` may be called on any thread, and raise NotFound once the pages are gone."""

    @property
    def nbytes(self) -> int:
        """The size of the copy."""

    def read(self, image: Image) -> None:
        """Copies the positions into `image`."""

    def fill(self, image: Image) -> None:
        """Copies the positions out of `image`."""


class KvMover(Protocol):
    """Copies KV between nodes. Implemented by the data plane. Nothing here blocks. Each callback is
    called once, on a thread of the data plane's."""

    def reads_device(self, address: str) -> bool:
        """Whether this node reads the device memory of the node at this address."""
        return False

    def lend(
        self, pages: KvPages, lent: Callable[[str, bytes], None], *, on_device: bool = False
    ) -> None:
        """Makes a copy of the pages readable by peers. `lent` gets the name of its region, and its
        digest; no name if that was not possible. `on_device`: who asks for it reads this node's
        device memory, so that the copy need not come to the host's."""

    def bring(
        self,
        address: str,
        region: str,
        digest: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        """Fills the pages with such a copy of a peer. `brought` is told whether that worked."""

    def end(self, region: str) -> None:
        """Nobody reads the copy any more. Unknown regions are ignored."""


def movable(tokens: int) -> int:
    """How many positions of a sequence another node is asked for first, if `tokens` of its tokens
    are known. They fill whole pages. All positions before the last token have been run, because it
    was drawn after them. Whether its own position has been run is not known, so it is left out."""
    return (tokens - 1) // PAGE * PAGE


@dataclass(frozen=True, slots=True)
class Restoration:
    """What host memory has of a sequence's KV, and what it takes to have it on the device."""

    positions: int
    copy_s: float
    """Seconds to copy it."""
    compute_s: float
    """Seconds to compute it. 0: not known, which counts as long."""

    @property
    def worth(self) -> bool:
        """Whether it is copied."""
        return not self.compute_s or self.copy_s < self.compute_s


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

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        """Sequences that have KV in blocks start <= block < stop only share a page with others of
        their kind: into how many parts it is divided. 1: a sequence needs a page of its own. So it
        is if the model is not open, or has no KV in these blocks."""

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        """Positions of whole pages that sequences of the model can still take, if sequences take
        what is promised, positions for each need. Below 0: that is more than there is."""

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """`wanted`: for how many positions sequences of each model wait. Models that have more than
        their share let go of as much, when their sequences end. It holds until the next call."""

    def keeps(self, model_id: ModelId, start: int, stop: int) -> bool:
        """Whether the model's sequences have KV in blocks start <= block < stop. Those of a model
        that has none in any block run whole, in one row. True if the model is not open."""

    def adopt(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        """Starts a sequence, which must be run whole on this node, with the KV of the longest
        cached beginning of `tokens`, but never of all of them. Only what was computed with the same
        adapter counts. Returns the number of its positions.
        0: nothing is cached, and the sequence is not known yet."""

    def restorable(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> Restoration | None:
        """What host memory has of the KV that follows what `adopt` found for the same sequence. If
        it is worth copying, the sequence is started, and `restore` brings it."""

    def restore(self, key: SequenceKey) -> tuple[int, bool]:
        """Brings a portion of what is restorable. Returns (the positions that the sequence has now,
        whether more come with the next call). If it has none in the end, it is not known."""

    def receive(
        self,
        model_id: ModelId,
        key: SequenceKey,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        """Starts a sequence like `adopt`, with pages for all that can come of another node's KV:
        `movable(len(tokens))` positions. Returns how many of them are cached here.
        CapacityExceeded: there are too few pages, and the sequence is not known."""

    def receive_more(self, key: SequenceKey, end: int) -> None:
        """Takes pages for further positions, up to `end`, of a sequence that `receive` started.
        CapacityExceeded changes nothing."""

    def received(self, key: SequenceKey, tokens: tuple[int, ...]) -> None:
        """The KV of `tokens`, the tokens of the first positions, has come. The sequence goes on
        after these."""

    def position_bytes(self, model_id: ModelId) -> int:
        """Bytes of the KV of one position in the whole model."""
