"""What a chat template does with tools, learned by trying it.

Templates differ in what they read and in how they write a call. Reading their source would be
guessing, so they are given a short chat with words that occur nowhere else, and what comes out is
looked through. What a template writes for a call of the past is also what the model was taught to
write for a call of its own.
"""

import json
from itertools import product
from typing import Any

import msgspec

from shared.chat_template import ChatTemplate
from shared.errors import BadInput

_TOOL, _NAME, _KEY, _VALUE, _RESULT = "zqtool", "zqcall", "zqkey", "zqvalue", "zqresult"
_ID = "zq0000001"
"""Some templates insist on nine letters and digits."""
_USER = {"role": "user", "content": "zquser"}


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    tools: bool = False
    """Whether the prompt names the tools."""
    call: str = ""
    """What it writes for a message with a call; empty if calls are left out of the prompt."""
    results: bool = False
    """Whether the prompt has the results of calls."""
    text_arguments: bool = False
    """Whether it takes a call's arguments as text, not as an object."""
    no_content: bool = False
    """Whether a message with calls and no content must have null for it, not an empty text."""


def manner_of(template: ChatTemplate) -> Manner:
    """Renders the template several times."""
    parameters = {"type": "object", "properties": {_KEY: {"type": "string"}}}
    described = {"name": _TOOL, "description": "", "parameters": parameters}
    tool = {"type": "function", "function": described}
    tools = _TOOL in _rendered(template, [_USER], [tool])
    before = _rendered(template, [_USER], [tool])
    for text_arguments, no_content in product((False, True), repeat=2):
        calling = _calling(text_arguments, no_content)
        after = _rendered(template, [_USER, calling], [tool])
        if all(word in after for word in (_NAME, _KEY, _VALUE)):
            break
    else:
        return Manner(tools=tools)
    answered = {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _NAME}
    return Manner(
        tools=tools,
        call=_behind(before, after),
        results=_RESULT in _rendered(template, [_USER, calling, answered], [tool]),
        text_arguments=text_arguments,
        no_content=no_content,
    )


def _calling(text_arguments: bool, no_content: bool) -> dict[str, Any]:
    arguments: object = {_KEY: _VALUE}
    if text_arguments:
        arguments = json.dumps(arguments)
    function = {"name": _NAME, "arguments": arguments}
    calls = [{"id": _ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": None if no_content else "", "tool_calls": calls}


def _rendered(template: ChatTemplate, messages: list[Any], tools: list[Any]) -> str:
    """The prompt; empty if the template refuses."""
    try:
        return template.render(messages, add_generation_prompt=False, arguments={}, tools=tools)
    except BadInput:
        return ""


def _behind(before: str, after: str) -> str:
    """What the longer text has behind the place where it begins to differ."""
    length = 0
    while length < min(len(before), len(after)) and before[length] == after[length]:
        length += 1
    return after[length:]
