"""A part of a model: a run of its blocks, which one device of a group holds."""

import msgspec


class Part(msgspec.Struct, frozen=True, order=True):
    """Blocks start <= block < stop."""

    start: int
    stop: int

    @property
    def blocks(self) -> range:
        return range(self.start, self.stop)

    @property
    def size(self) -> int:
        """The number of its blocks."""
        return self.stop - self.start

    def __str__(self) -> str:
        last = self.stop - 1
        return f"block {last}" if self.size == 1 else f"blocks {self.start}-{last}"


def whole(blocks: int) -> Part:
    """All of a model with so many blocks."""
    return Part(0, blocks)
