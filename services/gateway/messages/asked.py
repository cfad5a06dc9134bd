"""What a body of the Messages API asks for, as a chat."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from services.gateway.api_error import invalid
from services.gateway.asked import Asked, of_chat
from services.gateway.bodies import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    FunctionTool,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolName,
)
from services.gateway.messages.bodies import (
    AnyChoice,
    AutoChoice,
    CountTokensBody,
    MessagesBody,
    MessagesTool,
    NoneChoice,
    TextPart,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingPart,
    ToolChoice,
    ToolResultPart,
    ToolUsePart,
    Turn,
)

NAMES = {
    "messages": "messages",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}
"""Where fields of a chat are called otherwise."""


def asked_of(body: MessagesBody) -> Asked:
    """ApiError 400 names what does not fit, as a chat has it (`NAMES`)."""
    chat = _chat(body)
    chat.stream = body.stream
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.temperature = body.temperature
    chat.top_p = body.top_p
    chat.top_k = body.top_k
    return of_chat(chat)


def counted_of(body: CountTokensBody) -> Asked:
    """What would be asked for if the body had all that a request needs. Errors as of `asked_of`."""
    return of_chat(_chat(body))


def _chat(body: CountTokensBody) -> ChatBody:
    messages = list(_messages(body))
    if body.messages and body.messages[-1].role == "assistant":
        invalid("messages", "must end with a turn of the user: answers cannot be begun for a model")
    chat = ChatBody(model=body.model, messages=messages)
    if body.thinking is not None and not isinstance(body.thinking, ThinkingAdaptive):
        thinks = not isinstance(body.thinking, ThinkingDisabled)
        chat.chat_template_kwargs = {"enable_thinking": thinks}
    chat.tools = [_tool(tool) for tool in body.tools or ()]
    if (choice := body.tool_choice) is not None:
        chat.tool_choice = _choice(choice)
        chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if body.output_config is not None and (wanted := body.output_config.format):
        schema = JsonSchema(schema=wanted.schema)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    return chat


def _tool(tool: MessagesTool) -> Tool:
    function = FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(
    choice: AutoChoice | AnyChoice | NoneChoice | ToolChoice,
) -> Literal["none", "auto", "required"] | NamedTool:
    match choice:
        case ToolChoice():
            return NamedTool(type="function", function=ToolName(name=choice.name))
        case AnyChoice():
            return "required"
        case NoneChoice():
            return "none"
    return "auto"


def _messages(body: CountTokensBody) -> Iterator[ChatMessage]:
    """Turns of the same role that follow each other are one message."""
    if system := _text(body.system):
        yield ChatMessage(role="system", content=system)
    last: ChatMessage | None = None
    for number, turn in enumerate(body.messages):
        for message in _of_turn(turn, f"messages[{number}]"):
            if last is not None and last.role == message.role != "tool":
                last = _joined(last, message)
                continue
            if last is not None:
                yield last
            last = message
    if last is not None:
        yield last


def _of_turn(turn: Turn, where: str) -> Iterator[ChatMessage]:
    if isinstance(turn.content, str):
        yield ChatMessage(role=turn.role, content=turn.content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, part in enumerate(turn.content):
        place = f"{where}.content[{number}]"
        match part:
            case TextPart():
                texts.append(part.text)
            case ThinkingPart():
                _check_role(turn, "assistant", place)
                thoughts.append(part.thinking)
            case ToolUsePart():
                _check_role(turn, "assistant", place)
                calls.append(_call(part))
            case ToolResultPart():
                _check_role(turn, "user", place)
                if texts:
                    invalid(place, "results of tools go before the text of a turn")
                content = _text(part.content)
                yield ChatMessage(role="tool", content=content, tool_call_id=part.tool_use_id)
    if texts or thoughts or calls:
        yield ChatMessage(
            role=turn.role,
            content="\n".join(texts),
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=calls or None,
        )


def _check_role(turn: Turn, role: str, place: str) -> None:
    if turn.role != role:
        invalid(place, f"only turns of the {role} have such a part")


def _call(part: ToolUsePart) -> ToolCall:
    arguments = msgspec.json.encode(part.input).decode()
    return ToolCall(id=part.id, function=CalledFunction(name=part.name, arguments=arguments))


def _text(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    def lines(*texts: object) -> str:
        return "\n".join(str(text) for text in texts if text)

    return ChatMessage(
        role=one.role,
        content=lines(one.content, other.content),
        reasoning_content=lines(one.reasoning_content, other.reasoning_content) or None,
        tool_calls=[*(one.tool_calls or ()), *(other.tool_calls or ())] or None,
    )
