"""What a body of the Responses API asks for, as a chat."""

from collections.abc import Iterator, Sequence
from typing import Literal

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
from services.gateway.responses.bodies import (
    InputItem,
    InputPart,
    NamedFunction,
    ResponsesBody,
    ResponsesTool,
    TextFormat,
)

NAMES = {
    "messages": "input",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Where fields of a chat are called otherwise."""
_STATELESS = "nothing is stored here; send the whole conversation in input"
_REFUSED = {
    "store": "nothing is stored here; leave it out, or send false",
    "background": "answers are given at once; leave it out, or send false",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "there are no templates of prompts here; send the text itself in input",
}
_SYSTEM = ("system", "developer")


def asked_of(body: ResponsesBody) -> Asked:
    """ApiError 400 names what does not fit, as a chat has it (`NAMES`)."""
    for field, why in _REFUSED.items():
        if getattr(body, field):
            invalid(field, why)
    chat = ChatBody(model=body.model, messages=_messages(body))
    chat.stream = body.stream
    chat.max_completion_tokens = body.max_output_tokens
    chat.temperature = body.temperature
    chat.top_p = body.top_p
    chat.user = body.user
    chat.prompt_cache_key = body.prompt_cache_key
    chat.tools = [_tool(tool) for tool in body.tools or ()]
    chat.tool_choice = _choice(body.tool_choice)
    chat.parallel_tool_calls = body.parallel_tool_calls
    if body.reasoning is not None:
        chat.reasoning_effort = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        chat.response_format = _format(body.text.format)
    return of_chat(chat)


def _tool(tool: ResponsesTool) -> Tool:
    function = FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    if not isinstance(choice, NamedFunction):
        return choice
    return NamedTool(type="function", function=ToolName(name=choice.name))


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type)
    if wanted.schema is None:
        invalid("text.format.schema", "is needed for type 'json_schema'")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=wanted.schema))


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    if isinstance(body.input, str):
        messages = [ChatMessage(role="user", content=body.input)]
    else:
        messages = list(_of_items(body.input))
    if not body.instructions:
        return messages
    first = ChatMessage(role="system", content=body.instructions)
    if messages and messages[0].role in _SYSTEM:  # of which many templates know only one
        own = messages.pop(0)
        first = ChatMessage(role=own.role, content=f"{body.instructions}\n{own.content}")
    return [first, *messages]


def _of_items(items: Sequence[InputItem]) -> Iterator[ChatMessage]:
    """Thoughts, text and calls that follow each other are one message of the assistant."""
    open_: ChatMessage | None = None
    for number, item in enumerate(items):
        where = f"input[{number}]"
        if item.type in ("reasoning", "function_call") or item.role == "assistant":
            if open_ is None or not _continues(open_, item):
                if open_ is not None:
                    yield open_
                open_ = ChatMessage(role="assistant", content="")
            _add(open_, item, where)
            continue
        if open_ is not None:
            yield open_
            open_ = None
        yield _message(item, where)
    if open_ is not None:
        yield open_


def _continues(message: ChatMessage, item: InputItem) -> bool:
    """Whether the item may be of the same message: thoughts go before text, text before calls."""
    if item.type == "function_call":
        return True
    return not (message.tool_calls or message.content)


def _add(message: ChatMessage, item: InputItem, where: str) -> None:
    match item.type:
        case "reasoning":
            thoughts = (message.reasoning_content, _text(item.content, where))
            message.reasoning_content = "\n".join(filter(None, thoughts)) or None
        case "function_call":
            if item.call_id is None or item.name is None:
                invalid(where, "a call has call_id, name and arguments")
            function = CalledFunction(name=item.name, arguments=item.arguments or "")
            call = ToolCall(id=item.call_id, function=function)
            message.tool_calls = [*(message.tool_calls or ()), call]
        case _:
            message.content = _text(item.content, where)


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.type == "function_call_output":
        if item.call_id is None:
            invalid(f"{where}.call_id", "is needed: the id of the call that this is the result of")
        content = _text(item.output, f"{where}.output")
        return ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
    if item.role is None:
        invalid(f"{where}.role", "is needed for a message")
    return ChatMessage(role=item.role, content=_text(item.content, f"{where}.content"))


def _text(content: str | Sequence[InputPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)
