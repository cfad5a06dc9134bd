"""What every API's answers have in common."""

from collections.abc import Sequence
from typing import Protocol

from services.gateway.api_error import ApiError
from services.gateway.generation import Delta
from services.gateway.replies.parts import Reply

WAITING = b": waiting\n\n"
"""An SSE comment: clients ignore it, and proxies see that the connection lives."""


class StreamEncoder(Protocol):
    """Writes the events of one answer's stream. Each ends with an empty line."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """What is new."""

    def waiting(self) -> bytes:
        """What says that the stream lives, while there is nothing to tell."""

    def last(self) -> bytes:
        """What follows the events of the choices; it ends with `end`."""

    @property
    def end(self) -> bytes:
        """What alone is left to say to a client that has all that a stream told it."""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that fails after it has begun."""


class Encoder(StreamEncoder, Protocol):
    """Writes one answer as an API has it: whole, or as a stream."""

    @property
    def long(self) -> bool:
        """Whether a whole answer takes long to write."""

    def whole(self, replies: Sequence[Reply]) -> list[bytes]:
        """A whole answer, with the reply of each choice, in pieces: to copy a long one takes so
        long that others would notice."""
