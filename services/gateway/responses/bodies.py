"""The bodies of OpenAI's Responses API as they come over the wire.

What cannot be honoured has a type that only fits values that change nothing, is refused in
`asked.py`, or is an unknown field. Each is refused by name.
"""

from typing import Any, Literal

import msgspec


class InputPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: Any = None
    """Has no effect, as what follows."""
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message, a call of a function, its result, or thoughts. Which fields it has depends on its
    type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    """Of a message, or of thoughts."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    id: Any = None
    """Has no effect, as what follows."""
    status: Any = None
    summary: Any = None
    encrypted_content: None = None
    phase: Any = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    """Has no effect, as `name`."""
    strict: bool | None = None
    """Has no effect: the answer keeps to the schema in any case."""


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    """Has no effect: thoughts come as they are."""


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Has no effect."""


class ResponsesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """As of a chat's functions."""


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    """Comes back with the answer."""
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: Any = None
    """Has no effect, as what follows."""
    max_tool_calls: int | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Has no effect: thoughts come in the clear."""
    top_logprobs: Literal[0] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    # Refused with a hint.
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
