"""The Messages API's answers.

A stream is `message_start`, then for each block of content `content_block_start`, its deltas and
`content_block_stop`, then `message_delta` with the reason of the end, and `message_stop`.
"""

from collections.abc import Sequence

import msgspec

from services.gateway.api_error import ApiError
from services.gateway.asked import Asked
from services.gateway.encoder import WAITING
from services.gateway.generation import Delta, Generation
from services.gateway.messages.answer_bodies import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Ended,
    Event,
    Message,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    Stop,
    TextContent,
    TextDelta,
)
from services.gateway.messages.errors import error_body
from services.gateway.replies.parts import Reply, said
from services.gateway.text import TextCodec


class MessagesAnswers:
    """Implements services.gateway.encoder.Encoder."""

    long = False

    def __init__(
        self, asked: Asked, generation: Generation, answer_id: str, codec: TextCodec, created: int
    ) -> None:
        self._generation = generation
        self._id = answer_id
        self._begun = False
        self._blocks = 0
        """The number of blocks that have begun."""
        self._open = False
        """Whether the last of them has not ended."""

    def whole(self, replies: Sequence[Reply]) -> bytes:
        text = replies[0].content
        return msgspec.json.encode(self._message([TextContent(text)] if text else []))

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._of_delta(delta))

    def _of_delta(self, delta: Delta) -> list[bytes]:
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            start = self._message([])
            start.stop_reason = start.stop_sequence = None
            events.append(MessageStart(start))
        if text := said(delta.parts):
            if not self._open:
                self._open = True
                self._blocks += 1
                events.append(ContentBlockStart(self._blocks - 1, TextContent("")))
            events.append(ContentBlockDelta(self._blocks - 1, TextDelta(text)))
        if delta.finish and self._open:
            self._open = False
            events.append(ContentBlockStop(self._blocks - 1))
        return [_event(event) for event in events]

    def waiting(self) -> bytes:
        """No event goes before `message_start`, which waits for the first token: it has the number
        of cached ones."""
        return _event(Ping()) if self._begun else WAITING

    def last(self) -> bytes:
        return _event(MessageEnd(Ended(*self._stop()), self._usage())) + self.end

    @property
    def end(self) -> bytes:
        return _event(MessageStop())

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._id) + b"\n\n"

    def _message(self, content: list[TextContent]) -> Message:
        reason, sequence = self._stop()
        return Message(
            id=f"msg_{self._id}",
            model=self._generation.record.name,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _stop(self) -> tuple[Stop | None, str | None]:
        (choice,) = self._generation.choices
        match choice.finish:
            case None:
                return None, None
            case "length":
                return "max_tokens", None
        return ("stop_sequence" if choice.stop_string else "end_turn"), choice.stop_string

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


def _event(event: Event) -> bytes:
    name: str = type(event).__struct_config__.tag  # type: ignore[assignment]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
