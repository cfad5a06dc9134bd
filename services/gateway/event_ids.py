"""Streams that can be taken up again: every event has an id, and events that a client has are left
out.

The events of a choice are a function of its tokens. So an id counts, for each choice, the events so
far, whatever the order in which tokens of several choices came. With each count goes a checksum of
the tokens up to there: an answer that goes on otherwise than it began is refused, not continued.
"""

from collections.abc import Sequence
from zlib import crc32

from services.gateway.api_error import ApiError
from services.gateway.encoder import StreamEncoder
from services.gateway.generation import Delta
from services.gateway.idempotency import END, Mark, mark

_EVENT_END = b"\n\n"


class NumberedAnswers:
    def __init__(self, answers: StreamEncoder, marks: Sequence[Mark] | None, choices: int) -> None:
        """`marks`: how much of each choice the client has. None: everything."""
        self._answers = answers
        self._marks = marks
        self._events = [0] * choices
        self._checks = [0] * choices
        self._ids = [mark(0, 0)] * choices

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """The events that the client does not have. ApiError 409 if it has others."""
        if self._marks is None:
            return b""
        return b"".join(self._of_delta(delta, self._marks) for delta in deltas)

    def _of_delta(self, delta: Delta, marks: Sequence[Mark]) -> bytes:
        choice = delta.choice.index
        if delta.token is not None:
            self._checks[choice] = crc32(delta.token.to_bytes(4), self._checks[choice])
        seen = marks[choice]
        parts: list[bytes] = []
        for event in self._answers.events([delta]).split(_EVENT_END)[:-1]:
            self._events[choice] += 1
            self._ids[choice] = here = mark(self._events[choice], self._checks[choice])
            if self._events[choice] > seen.events:
                parts += (b"id: ", ",".join(self._ids).encode(), b"\n", event, _EVENT_END)
            elif self._events[choice] == seen.events and here != mark(*_parsed(seen)):
                raise _other()
        if delta.finish and self._events[choice] < seen.events:
            raise _other()
        return b"".join(parts)

    def last(self) -> bytes:
        data = self._answers.last()
        if self._marks is None:
            return self.end
        return data if data == self.end else b"id: " + END.encode() + b"\n" + data

    @property
    def end(self) -> bytes:
        return self._answers.end

    def waiting(self) -> bytes:
        return self._answers.waiting()

    def failed(self, error: ApiError) -> bytes:
        return self._answers.failed(error)


def _parsed(seen: Mark) -> tuple[int, int]:
    return seen.events, int(seen.check, 16)


def _other() -> ApiError:
    return ApiError(
        409,
        "Last-Event-ID is not of this answer: leave it out to get the answer from its beginning",
        param="Last-Event-ID",
        code="conflict",
    )
