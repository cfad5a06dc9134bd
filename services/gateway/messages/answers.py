"""The Messages API's answers.

A stream is `message_start`, then for each block of content `content_block_start`, its deltas and
`content_block_stop`, then `message_delta` with the reason of the end, and `message_stop`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from services.gateway.api_error import ApiError
from services.gateway.asked import Asked
from services.gateway.encoder import WAITING
from services.gateway.generation import Delta, Generation
from services.gateway.messages.answer_bodies import (
    Content,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Event,
    InputJsonDelta,
    Message,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    Stop,
    StopDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ThinkingTokens,
    ToolUseContent,
)
from services.gateway.messages.errors import error_body
from services.gateway.replies.parts import Began, Called, Ended, Grew, Reply, Run, Thought
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
        self._reply = Reply()

    def whole(self, replies: Sequence[Reply]) -> list[bytes]:
        return [msgspec.json.encode(self._message([_content(run) for run in replies[0].runs]))]

    def events(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(_written(event) for delta in deltas for event in self._of(delta))

    def _of(self, delta: Delta) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            start = self._message([])
            start.stop_reason = start.stop_sequence = None
            yield MessageStart(start)
        steps = self._reply.add(delta.parts)
        if delta.finish:
            steps += self._reply.end()
        for step in steps:
            number = step.run.number
            match step:
                case Began(run):
                    yield ContentBlockStart(number, _empty(run))
                case Grew(run, text):
                    yield ContentBlockDelta(number, _delta(run, text))
                case Ended():
                    yield ContentBlockStop(number)

    def waiting(self) -> bytes:
        """No event goes before `message_start`, which waits for the first token: it has the number
        of cached ones."""
        return _written(Ping()) if self._begun else WAITING

    def last(self) -> bytes:
        return _written(MessageEnd(StopDelta(*self._stop()), self._usage())) + self.end

    @property
    def end(self) -> bytes:
        return _written(MessageStop())

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error, self._id) + b"\n\n"

    def _message(self, content: list[Content]) -> Message:
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
            case "tool_calls":
                return "tool_use", None
        return ("stop_sequence" if choice.stop_string else "end_turn"), choice.stop_string

    def _usage(self) -> MessageUsage:
        usage = self._generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(usage.completion_tokens_details.reasoning_tokens),
        )


def _empty(run: Run) -> Content:
    if run.kind is Called:
        return ToolUseContent(run.id, run.name, {})
    return ThinkingContent("") if run.kind is Thought else TextContent("")


def _delta(run: Run, text: str) -> TextDelta | ThinkingDelta | InputJsonDelta:
    if run.kind is Called:
        return InputJsonDelta(text)
    return ThinkingDelta(text) if run.kind is Thought else TextDelta(text)


def _content(run: Run) -> Content:
    if run.kind is Called:
        return ToolUseContent(run.id, run.name, _object(run.text))
    return ThinkingContent(run.text) if run.kind is Thought else TextContent(run.text)


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; empty if the answer was cut off in them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _written(event: Event) -> bytes:
    name: str = type(event).__struct_config__.tag  # type: ignore[assignment]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
