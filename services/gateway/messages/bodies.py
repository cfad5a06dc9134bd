"""The bodies of Anthropic's Messages API as they come over the wire.

What cannot be honoured has a type that only fits values that change nothing, or is an unknown
field: both are refused by name.
"""

from typing import Any, Literal

import msgspec


class _Part(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: Any = None
    """Has no effect: prompts are cached by what they begin with, without being told."""


class TextPart(_Part, tag="text"):
    text: str
    citations: list[Any] | None = None
    """Has no effect."""


class ThinkingPart(_Part, tag="thinking"):
    thinking: str
    signature: str = ""
    """Has no effect."""


class ToolUsePart(_Part, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    """Has no effect."""


class ToolResultPart(_Part, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None
    """Has no effect: chat templates have no place for it. The content says what went wrong."""


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[TextPart | ThinkingPart | ToolUsePart | ToolResultPart]


class _Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    display: Literal["summarized"] | None = None


class ThinkingEnabled(_Thinking, tag="enabled"):
    budget_tokens: int | None = None
    """Has no effect: a model thinks until it is done."""


class ThinkingAdaptive(_Thinking, tag="adaptive"):
    pass


class ThinkingDisabled(_Thinking, tag="disabled"):
    pass


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: None = None


class MessagesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """As of a chat's functions."""
    cache_control: Any = None
    """Has no effect, as what follows."""
    eager_input_streaming: bool | None = None


class _ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(_ToolChoice, tag="auto"):
    pass


class AnyChoice(_ToolChoice, tag="any"):
    pass


class NoneChoice(_ToolChoice, tag="none"):
    pass


class ToolChoice(_ToolChoice, kw_only=True, tag="tool"):
    name: str


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None
    """Has no effect."""


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    messages: list[Turn]
    system: str | list[TextPart] | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    """Has no effect, as in a part."""
    tools: list[MessagesTool] | None = None
    tool_choice: AutoChoice | AnyChoice | NoneChoice | ToolChoice | None = None


class MessagesBody(CountTokensBody, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    context_management: None = None
    inference_geo: None = None
    mcp_servers: None = None
    speed: Literal["standard"] | None = None
