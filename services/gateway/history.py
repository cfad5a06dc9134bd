"""The messages of a chat: checked, and in the form that chat templates read."""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.api_error import invalid
from services.gateway.bodies import ChatBody, ChatMessage, TokenizeBody, ToolCall
from services.gateway.numbers import check_numbers
from services.gateway.replies.tools import ToolUse

MAX_MESSAGES = 4096
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
ROLES = ("system", "developer", "user", "assistant", "tool")


class Dialogue(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a chat template turns into a prompt."""

    messages: tuple[Mapping[str, Any], ...]
    """As Hugging Face's templates have them: `arguments` of calls are objects."""
    add_generation_prompt: bool
    arguments: Mapping[str, Any]
    """The caller's own switches for the template."""
    tools: ToolUse | None = None
    continued: bool = False
    """Whether the reply goes on with the last message."""
    effort: str | None = None
    """How much the model is to think, by OpenAI's words. None: as its template has it."""

    @property
    def chars(self) -> int:
        """The number of characters that are in the prompt in any case."""
        return sum(len(message["content"]) for message in self.messages)

    def first(self, field: str) -> int | None:
        """The number of the first message that has the field."""
        found = (i for i, message in enumerate(self.messages) if field in message)
        return next(found, None)


def dialogue_of(body: ChatBody | TokenizeBody, tools: ToolUse | None) -> Dialogue:
    """ApiError 400 names the field or message that does not fit."""
    messages = body.messages or ()
    if not messages:
        invalid("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        invalid("messages", f"at most {MAX_MESSAGES} messages")
    arguments, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    check_numbers(arguments, "chat_template_kwargs")
    if effort not in (None, *EFFORTS):
        invalid("reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        invalid("continue_final_message", "can't be used with add_generation_prompt")
    if continued and (messages[-1].tool_calls or not messages[-1].content):
        invalid("continue_final_message", "the last message must have content, and no calls")
    calls: dict[str, str] = {}
    """The function of every call so far, by the call's id."""
    return Dialogue(
        messages=tuple(_message(m, f"messages[{i}]", calls) for i, m in enumerate(messages)),
        add_generation_prompt=body.add_generation_prompt is not False and not continued,
        arguments=arguments,
        tools=tools,
        continued=continued,
        effort=effort,
    )


def _message(message: ChatMessage, where: str, calls: dict[str, str]) -> dict[str, Any]:
    _check(message, where)
    fields: dict[str, Any] = {"role": message.role, "content": _text(message, where)}
    if message.name is not None:
        fields["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    if message.role == "tool":
        fields |= _answered(message, where, calls)
    if message.tool_calls:
        fields["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
        calls |= {call.id: call.function.name for call in message.tool_calls}
    return fields


def _answered(message: ChatMessage, where: str, calls: Mapping[str, str]) -> dict[str, str]:
    """Which call a tool's message answers."""
    call = message.tool_call_id
    if not call:
        invalid(f"{where}.tool_call_id", "is needed: the id of the call that this is the result of")
    if call not in calls:
        invalid(f"{where}.tool_call_id", f"no assistant message before it has a call {call[:80]!r}")
    return {"tool_call_id": call, "name": message.name or calls[call]}


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    function = call.function
    try:
        arguments = msgspec.json.decode(function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        invalid(f"{where}.function.arguments", f"must be the text of a JSON object: {error}")
    check_numbers(arguments, f"{where}.function.arguments")
    named = {"name": function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": named}


def _text(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    for position, part in enumerate(content):
        if part.type != "text" or part.text is None:
            place = f"{where}.content[{position}]"
            invalid(place, f"only parts of type 'text' can be read, not {part.type!r}")
    return "\n".join(part.text or "" for part in content)


def _check(message: ChatMessage, where: str) -> None:
    """Refuses what would not be passed to the template, and so would be lost."""
    if message.role == "function":
        invalid(f"{where}.role", "'function' is not supported; use 'tool' with tool_call_id")
    if message.role not in ROLES:
        invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {message.role[:40]!r}")
    if message.function_call is not None:
        invalid(f"{where}.function_call", "is not supported; use tool_calls")
    if message.tool_calls and message.role != "assistant":
        invalid(f"{where}.tool_calls", "only messages of role 'assistant' have calls")
    if message.tool_call_id is not None and message.role != "tool":
        invalid(f"{where}.tool_call_id", "only messages of role 'tool' answer a call")
    for field in ("refusal", "audio"):
        if getattr(message, field) is not None:
            invalid(f"{where}.{field}", "is not supported; send the answer's content")
