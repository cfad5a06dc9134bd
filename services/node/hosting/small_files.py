"""The small files of checkpoints that this node read or fetched lately, such as tokenizers.

A model needs its tokenizer each time it wakes. A fetch from the asset store would take processor
time of the node and of the NATS server, just while the first prompt is computed.
"""

from collections import OrderedDict

MOST_BYTES = 256 << 20
"""Tokenizers have 1 to 20 MB, and models of one family have the same."""


class SmallFiles:
    """Keeps `most` bytes of files. Those that were used least lately make room for others. A file
    has its name in the asset store, which is a digest of its bytes."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._nbytes = 0
        self._files: OrderedDict[str, bytes] = OrderedDict()

    def get(self, name: str) -> bytes | None:
        if name in self._files:
            self._files.move_to_end(name)
        return self._files.get(name)

    def put(self, name: str, data: bytes) -> None:
        """Keeps the file, unless it alone is larger than `most`."""
        if name in self._files or len(data) > self._most:
            return
        self._files[name] = data
        self._nbytes += len(data)
        while self._nbytes > self._most:
            _, oldest = self._files.popitem(last=False)
            self._nbytes -= len(oldest)
