"""The bodies of the Messages API's answers, and the events of its streams."""

from typing import Any, Literal

import msgspec

Stop = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class _Tagged(msgspec.Struct, tag_field="type"):
    pass


# --- messages ----------------------------------------------------------------------


class TextContent(_Tagged, tag="text"):
    text: str
    citations: None = None


class ThinkingContent(_Tagged, tag="thinking"):
    thinking: str
    signature: str = ""


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    pass


class ToolUseContent(_Tagged, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


Content = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Of the prompt, without those that were cached."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    cache_creation: None = None
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"
    inference_geo: None = None


class Message(_Tagged, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: Stop | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class TokensCount(msgspec.Struct):
    input_tokens: int


# --- events ------------------------------------------------------------------------


class MessageStart(_Tagged, tag="message_start"):
    message: Message


class ContentBlockStart(_Tagged, tag="content_block_start"):
    index: int
    content_block: Content


class TextDelta(_Tagged, tag="text_delta"):
    text: str


class ThinkingDelta(_Tagged, tag="thinking_delta"):
    thinking: str


class InputJsonDelta(_Tagged, tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(_Tagged, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(_Tagged, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: Stop | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageEnd(_Tagged, tag="message_delta"):
    delta: StopDelta
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
