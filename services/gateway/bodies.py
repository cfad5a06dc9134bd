"""The bodies of completions as they come over the wire.

Unknown fields are refused by name, and so are known fields that would change the answer and that
the engine cannot honour (`unsupported`): a client never gets something other than it asked for. A
few fields that have no effect anywhere are accepted. docs/api.md lists all of them.
"""

import re
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from services.gateway.api_error import ApiError
from services.gateway.unsupported import Unsupported


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    """Has no effect, as `name`."""
    strict: bool | None = None
    """Has no effect: the answer keeps to the schema in any case."""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's field. Exactly one of its fields is given."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in llguidance's Lark syntax."""


class _Accepted(Unsupported, kw_only=True):
    """Fields that are accepted on purpose and have no effect."""

    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    """vLLM's; ours comes in the header X-Request-ID."""


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None: there are no parameters."""
    strict: bool | None = None
    """Whether the schema must be one that grammars can follow. Arguments keep to it in any case
    where it is."""

    @property
    def schema(self) -> dict[str, Any]:
        """Of the parameters."""
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return nothing if self.parameters is None else self.parameters


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionTool


class ToolName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: ToolName


class Common(_Accepted, kw_only=True, forbid_unknown_fields=True):
    model: str
    user: str | None = None
    prompt_cache_key: str | None = None
    """Requests with the same key, or else of the same user, go to the same instance while it has
    room."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    """Accepted if it equals `n`."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to every choice: the generated tokens themselves."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id."""
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    """How many of the most probable tokens come with each token of the prompt."""
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """How urgent it is (docs/tenants.md)."""
    guided_json: dict[str, Any] | str | None = None
    """An older name of `structured_outputs.json`, as the next are of its other fields."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(Common, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    # Known, and refused.
    tools: Any = None
    tool_choice: Any = None
    reasoning_effort: Any = None
    continue_final_message: Any = None
    refused: ClassVar[tuple[str, ...]] = (
        "tools",
        "tool_choice",
        "reasoning_effort",
        "continue_final_message",
    )


class ContentPart(msgspec.Struct, kw_only=True):
    """Of a message. Parts of other types have other fields, and are refused by their type."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str = ""
    """The text of a JSON object. Empty: no arguments."""
    parsed_arguments: Any = None
    """What OpenAI's client makes of them. It has no effect, as in `ChatMessage`."""


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Comes with streamed answers, and has no effect."""


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Known, and refused.
    function_call: Any = None
    refusal: Any = None
    audio: Any = None
    # Come with answers of others, and have no effect.
    annotations: Any = None
    id: Any = None
    # Clients make these of answers, and send them back with the rest.
    parsed: Any = None
    provider_specific_fields: Any = None


class ChatBody(Common, kw_only=True, forbid_unknown_fields=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    """Null: true, unless the final message is continued."""
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a prompt, or of messages."""

    model: str
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether a prompt begins as the model wants it. Null: it does."""
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


Json = TypeVar("Json", bound=msgspec.Struct)
_UNKNOWN = re.compile(
    r"^Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>[^`]*)`)?$"
)
_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$")


MAX_STRINGS = 1 << 17
"""In a body, names of fields included. More small values than any use needs would hold up
everybody's streams while they are decoded."""
MAX_NESTED = 1 << 16
"""Arrays and objects in a body."""
_STRING = re.compile(rb'"[^"]*"')


def decoded(raw: bytes, kind: type[Json]) -> Json:
    """A JSON body. ApiError 400 names the field that does not fit; 413: it has too many values."""
    if _count_quotes(raw) > 2 * MAX_STRINGS:
        raise ApiError(413, f"the body has more than {MAX_STRINGS} strings; send fewer at a time")
    if _count_nested(raw) > MAX_NESTED:
        message = f"the body has more than {MAX_NESTED} arrays and objects; send fewer at a time"
        raise ApiError(413, message)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if unknown := _UNKNOWN.match(str(error)):
            field = ".".join(filter(None, (unknown["path"], unknown["name"])))
            message = f"{field}: there is no such field; leave it out (docs/api.md lists all)"
            raise ApiError(400, message, param=field) from error
        match = _PATH.match(str(error))
        if match is None:
            raise ApiError(400, str(error), param=_missing(str(error))) from error
        message = f"{match['path']}: {match['what']}"
        raise ApiError(400, message, param=match["path"] or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error


def _count_quotes(raw: bytes) -> int:
    """Those that no backslash precedes: one or two for every string in JSON."""
    return raw.count(b'"') - raw.count(b'\\"')


def _count_nested(raw: bytes) -> int:
    """Of the arrays and objects in JSON: their number, if it is large; else no fewer."""
    if (count := raw.count(b"[") + raw.count(b"{")) <= MAX_NESTED:
        return count
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    bare = _STRING.sub(b"", plain)
    return bare.count(b"[") + bare.count(b"{")


def _missing(message: str) -> str | None:
    found = re.search(r"missing required field `(\w+)`", message)
    return found[1] if found else None
