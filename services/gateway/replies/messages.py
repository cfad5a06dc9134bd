"""Replies as messages of chats."""

from collections.abc import Iterable

from services.gateway.answer_bodies import (
    AnsweredCall,
    AnsweredFunction,
    AnswerMessage,
    CallDelta,
    FunctionDelta,
    MessageDelta,
)
from services.gateway.replies.parts import Argued, Called, Part, Reply, Said, Thought


def message_of(reply: Reply) -> AnswerMessage:
    calls, reasoning = reply.calls, reply.reasoning
    message = AnswerMessage(content=reply.content)
    if calls:
        message.tool_calls = [
            AnsweredCall(id=call.id, function=AnsweredFunction(call.name, call.arguments))
            for call in calls
        ]
    if reasoning:
        message.reasoning_content = message.reasoning = reasoning
    if not message.content and (calls or reasoning):
        message.content = None
    return message


def delta_of(parts: Iterable[Part]) -> MessageDelta:
    """What one event of a stream says: one entry for each call. Content, even if empty, for a token
    that gives nothing else."""
    delta = MessageDelta()
    calls: dict[int, CallDelta] = {}
    content, reasoning = "", ""
    for part in parts:
        match part:
            case Said(text):
                content += text
            case Thought(text):
                reasoning += text
            case Called(number, id_, name):
                calls[number] = CallDelta(number, FunctionDelta(name), id=id_, type="function")
            case Argued(number, text):
                call = calls.setdefault(number, CallDelta(number, FunctionDelta()))
                call.function.arguments += text
    if calls:
        delta.tool_calls = list(calls.values())
    if reasoning:
        delta.reasoning_content = delta.reasoning = reasoning
    if content or not (calls or reasoning):
        delta.content = content
    return delta
