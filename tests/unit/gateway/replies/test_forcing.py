"""Grammars of replies: what they allow is read as calls of the tools, by their schemas."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gateway.bodies import FunctionTool, Tool
from services.gateway.replies.dialects import HERMES, LLAMA, MISTRAL, QWEN_CODER, Dialect
from services.gateway.replies.forcing import grammar_of_reply
from services.gateway.replies.form import Form
from services.gateway.replies.parts import Call, Reply
from services.gateway.replies.reading import ReplyReader
from services.gateway.replies.tools import ToolUse
from shared import grammar
from tests.support.amounts import examples

BYTES = LLTokenizer("byte")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
TOOLS = (
    Tool(type="function", function=FunctionTool(name="weather", parameters=WEATHER)),
    Tool(type="function", function=FunctionTool(name="stop")),
)
DIALECTS = [HERMES, MISTRAL, LLAMA, QWEN_CODER]
NAMES = ["hermes", "mistral", "llama", "coder"]
CALLS = {
    HERMES: '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    MISTRAL: '[TOOL_CALLS] [{"name": "stop", "arguments": {}}]',
    LLAMA: '{"name": "stop", "parameters": {}}',
    QWEN_CODER: "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
}


def use(**more: Any) -> ToolUse:
    return ToolUse(tools=TOOLS, **more)


def form(dialect: Dialect | None, **more: bool) -> Form:
    tools = {tool.function.name: tool.function.schema for tool in TOOLS}
    return Form(dialect=dialect, tools=tools, sure=True, **more)


def allows(wanted: str, text: str, *, whole: bool = True) -> bool:
    """Whether a text, or the beginning of one, keeps to the grammar."""
    grammar.check(wanted)
    matcher = LLMatcher(BYTES, wanted, log_level=0)
    fits = all(matcher.consume_token(byte) for byte in text.encode())
    return fits and (matcher.is_accepting() or not whole)


def walked(wanted: str, seed: int, most: int = 600) -> tuple[str, bool]:
    """A random text by the grammar, and whether it may end there."""
    draw = random.Random(seed)
    matcher = LLMatcher(BYTES, wanted, log_level=0)
    text = bytearray()
    while len(text) < most and not (matcher.is_accepting() and draw.random() < 0.5):
        mask = matcher.compute_bitmask()
        allowed = [b for b in range(32, 127) if mask[b >> 3] >> (b & 7) & 1]
        allowed = allowed or [10] * bool(mask[1] >> 2 & 1)
        if not allowed:
            break
        text.append(draw.choice(allowed))
        assert matcher.consume_token(text[-1])
    return text.decode(), bool(matcher.is_accepting())


def read(how: Form, text: str) -> Reply:
    reader, reply = ReplyReader(how, str), Reply()
    reply.add([*reader.push(text), *reader.flush()])
    return reply


def check(call: Call) -> None:
    (tool,) = [tool for tool in TOOLS if tool.function.name == call.name]
    jsonschema.validate(json.loads(call.arguments), tool.function.schema)


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
@given(seed=st.integers(0, 1 << 30), several=st.booleans(), named=st.booleans())
@settings(max_examples=examples(12), deadline=None)
def test_forced_replies_are_calls(dialect: Dialect, seed: int, several: bool, named: bool) -> None:
    tools = use(required=True, several=several, named="weather" if named else None)
    text, ended = walked(grammar_of_reply(form(dialect), tools, ""), seed)
    reply = read(form(dialect), text)
    assert reply.content == "" or not ended
    assert reply.calls or not ended
    if ended:
        assert len(reply.calls) == 1 or several
        for call in reply.calls:
            check(call)
            assert not named or call.name == "weather"


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
def test_text_is_free_until_a_call_is_opened(dialect: Dialect) -> None:
    wanted = grammar_of_reply(form(dialect), use(), "")
    call = CALLS[dialect]
    assert allows(wanted, "")
    assert allows(wanted, "What is {} <tool_cal [TOOL_CAL?\n")
    assert allows(wanted, call)
    assert [c.name for c in read(form(dialect), call).calls] == ["stop"]
    unknown = call.replace("stop", "go")
    assert not allows(wanted, unknown, whole=False)
    if dialect.opening:
        assert allows(wanted, f"Well.\n{call}")
        assert not allows(wanted, f"Well.\n{unknown}", whole=False)


@pytest.mark.parametrize("dialect", [HERMES, QWEN_CODER], ids=["hermes", "coder"])
def test_how_many_calls(dialect: Dialect) -> None:
    twice = f"{CALLS[dialect]}\n{CALLS[dialect]}"
    for required in (False, True):
        assert allows(grammar_of_reply(form(dialect), use(required=required), ""), twice)
        single = grammar_of_reply(form(dialect), use(required=required, several=False), "")
        assert allows(single, CALLS[dialect])
        assert not allows(single, twice, whole=False)


def test_tags_may_leave_out_what_is_not_required() -> None:
    wanted = grammar_of_reply(form(QWEN_CODER), use(required=True), "")
    tags = {"city": "Rome", "unit": "c", "days": "3"}

    def call(*keys: str) -> str:
        said = "".join(f"<parameter={key}>\n{tags[key]}\n</parameter>\n" for key in keys)
        return f"<tool_call>\n<function=weather>\n{said}</function>\n</tool_call>"

    assert allows(wanted, call("city", "days"))
    assert allows(wanted, call("city", "unit", "days"))
    assert not allows(wanted, call("city"), whole=False)


@pytest.mark.parametrize("dialect", DIALECTS, ids=NAMES)
def test_thoughts_go_first(dialect: Dialect) -> None:
    call = CALLS[dialect]
    thinks = grammar_of_reply(form(dialect, thinks=True), use(required=True), "")
    assert allows(thinks, call)
    assert allows(thinks, f"<think>I {call} not </think>\n\n{call}")
    assert not allows(thinks, f"I think {call}", whole=False)
    thinking = grammar_of_reply(form(dialect, thinking=True), use(required=True), "")
    assert allows(thinking, f"I </think>{call}")
    assert not allows(thinking, call)
    assert read(form(dialect, thinking=True), f"I </think>{call}").reasoning == "I"


def test_an_answer_by_a_schema_after_thoughts_or_instead_of_calls() -> None:
    answer = grammar.from_schema({"type": "object", "properties": {}, "required": []})
    plain = grammar_of_reply(Form(), None, answer)
    assert plain == answer
    thinking = grammar_of_reply(Form(thinking=True), None, answer)
    assert allows(thinking, "so </think>\n{}")
    assert not allows(thinking, "{}")
    for how in (answer, grammar.from_regex("[{][}]"), grammar.from_lark('start: "{" x\nx: "}"')):
        either = grammar_of_reply(form(HERMES), use(), how)
        assert allows(either, "{}")
        assert allows(either, CALLS[HERMES])
        assert not allows(either, "Well", whole=False)
    assert not allows(grammar_of_reply(form(HERMES), use(required=True), answer), "{}")


def test_a_prompt_that_has_the_opening() -> None:
    wanted = grammar_of_reply(form(MISTRAL, calling=True), use(required=True), "")
    assert allows(wanted, ' [{"name": "stop", "arguments": {}}]')
    assert allows(wanted, '[{"name": "stop", "arguments": {}}, {"name": "stop", "arguments": {}}]')
    assert not allows(wanted, "[TOOL_CALLS]", whole=False)


def test_nothing_is_asked_of_a_plain_reply() -> None:
    assert grammar_of_reply(Form(), None, "") == ""
    assert grammar_of_reply(Form(thinking=True), None, "") == ""
