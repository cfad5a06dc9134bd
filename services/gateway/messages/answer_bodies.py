"""The bodies of the Messages API's answers, and the events of its streams."""

from typing import Literal

import msgspec

Stop = Literal["end_turn", "max_tokens", "stop_sequence"]


class _Tagged(msgspec.Struct, tag_field="type"):
    pass


# --- messages ----------------------------------------------------------------------


class TextContent(_Tagged, tag="text"):
    text: str
    citations: None = None


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Of the prompt, without those that were cached."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(_Tagged, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextContent]
    stop_reason: Stop | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCount(msgspec.Struct):
    input_tokens: int


# --- events ------------------------------------------------------------------------


class MessageStart(_Tagged, tag="message_start"):
    message: Message


class ContentBlockStart(_Tagged, tag="content_block_start"):
    index: int
    content_block: TextContent


class TextDelta(_Tagged, tag="text_delta"):
    text: str


class ContentBlockDelta(_Tagged, tag="content_block_delta"):
    index: int
    delta: TextDelta


class ContentBlockStop(_Tagged, tag="content_block_stop"):
    index: int


class Ended(msgspec.Struct):
    stop_reason: Stop | None
    stop_sequence: str | None


class MessageEnd(_Tagged, tag="message_delta"):
    delta: Ended
    usage: MessageUsage


class MessageStop(_Tagged, tag="message_stop"):
    pass


class Ping(_Tagged, tag="ping"):
    pass


# --- errors ------------------------------------------------------------------------


class MessagesErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessagesError(_Tagged, tag="error"):
    error: MessagesErrorDetail
    request_id: str


Event = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageEnd
    | MessageStop
    | Ping
    | MessagesError
)
