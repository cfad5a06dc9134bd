"""Long answers in JSON, encoded in small steps, between which other threads may run.

What is long is lists: a line for every token. To encode a whole answer in one go, or to copy it,
holds the interpreter's lock for as long as streams wait then.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

PIECE_BYTES = 1 << 16
Listed = Callable[[Iterable[object]], msgspec.Raw]
"""Encodes a JSON list."""


def listed(items: Iterable[object]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(map(msgspec.json.encode, items)) + b"]")


class Lists:
    """Lists of an answer that is written in pieces."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
        """`piece_bytes`: about the length of a piece."""
        self._piece_bytes = piece_bytes
        self._lists: list[list[bytes]] = []

    def add(self, items: Iterable[object]) -> msgspec.Raw:
        """Stands for a JSON list until `into`. JSON has no byte 0."""
        self._lists.append(list(_pieces(items, self._piece_bytes)))
        return msgspec.Raw(b"\0%d\0" % (len(self._lists) - 1))

    def into(self, body: object) -> list[bytes]:
        """The JSON of the body, with the lists in their places."""
        between = msgspec.json.encode(body).split(b"\0")
        pieces = between[:1]
        for number, after in zip(between[1::2], between[2::2], strict=True):
            pieces += (*self._lists[int(number)], after)
        return pieces


def _pieces(items: Iterable[object], piece_bytes: int) -> Iterator[bytes]:
    """A JSON list."""
    begun, nbytes = [b"["], 0
    for number, item in enumerate(items):
        encoded = msgspec.json.encode(item)
        begun += (b",", encoded) if number else (encoded,)
        nbytes += len(encoded)
        if nbytes >= piece_bytes:
            yield b"".join(begun)
            begun, nbytes = [], 0
    yield b"".join((*begun, b"]"))
