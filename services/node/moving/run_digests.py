"""The digests of a run of chunks, checked while the bytes come."""

from collections.abc import Callable

from services.node.checkpoints.packing import Digest
from services.node.transport.base import Chunks
from shared.layout import Manifest


class RunDigests(Chunks):
    """Takes the bytes of a run of chunks in parts of any size, or hears of each chunk."""

    def __init__(
        self,
        manifest: Manifest,
        block: int,
        run: range,
        right: Callable[[int], None],
        region: str = "",
    ) -> None:
        """`right` is told of each chunk that has its manifest's digest, as soon as it is whole.
        `region`: the block's."""
        self.chunk_bytes = manifest.chunk_bytes
        self.digests = b"".join(manifest.blocks[block].digests[run.start : run.stop])
        self.region = region
        self.wrong: list[int] = []
        self.whole = 0
        """How many chunks have come, right or wrong."""
        self._digests = manifest.blocks[block].digests
        self._left = [(chunk, manifest.chunk_range(block, chunk)[1]) for chunk in reversed(run)]
        self._right = right
        self._digest = Digest()
        self._got = 0
        """Bytes of the chunk that is coming."""

    def __call__(self, part: memoryview) -> None:
        while part:
            chunk, nbytes = self._left[-1]
            piece = part[: nbytes - self._got]
            self._digest.update(piece)
            self._got += len(piece)
            part = part[len(piece) :]
            if self._got == nbytes:
                self._end(chunk)

    def _end(self, chunk: int) -> None:
        found, self._digest = self._digest.digest(), Digest()
        self._got = 0
        self.found(found == self._digests[chunk])

    def found(self, right: bool) -> None:
        """The next chunk is whole."""
        chunk, _ = self._left.pop()
        self.whole += 1
        if right:
            self._right(chunk)
        else:
            self.wrong.append(chunk)
