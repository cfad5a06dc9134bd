"""A sequence's share of the KV cache: the pages in which its positions lie."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.node.core.kv import PAGE
from services.node.engine.base import Row, SequenceKey
from shared.ids import NO_ADAPTER, ModelId


class Run(NamedTuple):
    """Positions first <= position < stop, which lie side by side from `slot` on."""

    slot: int
    first: int
    stop: int


@dataclass(slots=True, eq=False)
class KvSequence:
    """One stage's share of a sequence. A stage without layers needs no pages."""

    key: SequenceKey
    model_id: ModelId
    blocks: tuple[int, int]
    """(start, stop) of the stage that began the sequence."""
    layers: range
    limit: int
    """The most positions that the sequence may reach."""
    adapter: ModelId = NO_ADAPTER
    """The id of the adapter that its KV is computed with; empty: none."""
    parts: int = 1
    """Into how many parts a page is divided for this sequence, which takes single parts."""
    shift: int = 0
    """How much smaller the numbers of its pages are than the numbers of the memory they take."""
    pages: list[int] = field(default_factory=list)
    length: int = 0
    """Positions in the cache, or about to be written."""
    proposed: int = 0
    """How many of the last positions hold proposed tokens, which may be taken back."""
    live: bool = True
    """False once the sequence was freed."""
    known: int = 0
    """Number of its first pages whose tokens are known."""
    digest: bytes = b""
    """The digest of the tokens of these pages."""
    tail: list[int] = field(default_factory=list)
    """Known tokens after these pages."""

    def runs_on(self, row: Row, start: int) -> bool:
        """Whether the row, from block `start` on, goes on where a part before has left its
        sequence's stage: the same positions, in further blocks."""
        return self.blocks[1] == start and (row.position, row.count) == (0, self.length)

    def slots(self, first: int, count: int) -> list[int]:
        return [self.pages[p // PAGE] * PAGE + p % PAGE for p in range(first, first + count)]

    def runs(self, positions: int) -> list[Run]:
        """The runs that hold its first `positions` positions, which must be whole pages."""
        found: list[Run] = []
        for index in range(positions // PAGE):
            slot, first = self.pages[index] * PAGE, index * PAGE
            if found and found[-1].slot - found[-1].first == slot - first:
                found[-1] = found[-1]._replace(stop=first + PAGE)
            else:
                found.append(Run(slot, first, first + PAGE))
        return found


class Restoring:
    """A sequence whose pages come from host memory."""

    def __init__(self, digests: Iterable[bytes]) -> None:
        self.digests = deque(digests)
        """The digests of the pages that it gets next."""
        self.coming: list[tuple[int, bytes]] = []
        """The pages that it has got, with their digests, which may not be whole yet."""
