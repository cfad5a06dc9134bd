"""The digests of a run of chunks, checked while the bytes come."""

from collections.abc import Callable

from services.node.checkpoints.packing import Digest
from services.node.transport.base import Chunks
from shared.layout import Manifest


class RunDigests(Chunks):
    """Takes the bytes of a run of chunks in parts of any size, or hears of its chunks."""

    def __init__(
        self,
        manifest: Manifest,
        block: int,
        run: range,
        right: Callable[[range], None],
        region: str = "",
    ) -> None:
        """`right` is told of the chunks that have their manifest's digests, as soon as they are
        whole. `region`: the block's."""
        self.chunk_bytes = manifest.chunk_bytes
        self.digests = b"".join(manifest.blocks[block].digests[run.start : run.stop])
        self.region = region
        self.wrong: list[int] = []
        self.whole = 0
        """How many chunks have come, right or wrong."""
        self._manifest, self._block, self._run = manifest, block, run
        self._right = right
        self._digest = Digest()
        self._got = 0
        """Bytes of the chunk that is coming."""

    def __call__(self, part: memoryview) -> None:
        while part:
            chunk = self._run[self.whole]
            _, nbytes = self._manifest.chunk_range(self._block, chunk)
            piece = part[: nbytes - self._got]
            self._digest.update(piece)
            self._got += len(piece)
            part = part[len(piece) :]
            if self._got == nbytes:
                self._end(chunk)

    def _end(self, chunk: int) -> None:
        found, self._digest = self._digest.digest(), Digest()
        self._got = 0
        self.found(1, right=found == self._manifest.blocks[self._block].digests[chunk])

    def found(self, count: int, *, right: bool) -> None:
        """The next `count` chunks are whole."""
        chunks = self._run[self.whole : self.whole + count]
        self.whole += count
        if right:
            self._right(chunks)
        else:
            self.wrong += chunks
