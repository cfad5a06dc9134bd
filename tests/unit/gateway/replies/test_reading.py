"""What a reply's text is read as. However it is cut, the parts are the same."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.replies.dialects import HERMES, LLAMA, MISTRAL, QWEN_CODER, Dialect
from services.gateway.replies.form import Form
from services.gateway.replies.parts import Argued, Called, Part, Reply, Said, Thought
from services.gateway.replies.reading import ReplyReader
from tests.support.amounts import examples

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {},
}
PLAIN = Form()
THINKS = Form(thinks=True)
OPEN = Form(thinking=True)


def of(dialect: Dialect, **more: bool) -> Form:
    return Form(dialect=dialect, tools=TOOLS, **more)


def read(form: Form, *pieces: str) -> list[Part]:
    reader = ReplyReader(form, lambda number: f"c{number}")
    return [part for piece in pieces for part in reader.push(piece)] + reader.flush()


def told(parts: list[Part]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Reasoning, content and calls."""
    reply = Reply()
    reply.add(parts)
    return reply.reasoning, reply.content, [(c.id, c.name, c.arguments) for c in reply.calls]


F = ("c0", "f", '{"a": "x"}')
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
HERMES_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
CODER_F = (
    "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n"
    "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
)
LLAMA_F = '{"name": "f", "parameters": {"a": "x"}}'
CASES: list[tuple[Form, str, tuple[str, str, list[tuple[str, str, str]]]]] = [
    (PLAIN, " a <think> b ", ("", " a <think> b ", [])),
    (THINKS, "<think>\nwhy\n</think>\n\nso", ("why", "so", [])),
    (THINKS, "\n<think>why</think>", ("why", "", [])),
    (THINKS, "<think>why, but never", ("why, but never", "", [])),
    (THINKS, "<thin ice", ("", "<thin ice", [])),
    (THINKS, " so <think>", ("", " so <think>", [])),
    (OPEN, "\nwhy </thin </think>so\n", ("why </thin", "so\n", [])),
    (of(HERMES), "so ", ("", "so ", [])),
    (of(HERMES), HERMES_F, ("", "", [F])),
    (of(HERMES), f"I call:\n\n{HERMES_F}\n{HERMES_G}", ("", "I call:", [F, ("c1", "g", "{}")])),
    (of(HERMES), f"{HERMES_F}\nand so", ("", "and so", [F])),
    (of(HERMES, several=False), f"{HERMES_F}\n{HERMES_G}", ("", HERMES_G, [F])),
    (of(HERMES, thinks=True), f"<think>a</think>\n{HERMES_F}", ("a", "", [F])),
    (of(HERMES), '<tool_call>{"name": "g"}</tool_call>', ("", "", [("c0", "g", "{}")])),
    (
        of(HERMES),
        '<tool_call>{"arguments": {"a": "</tool_call>\\""}, "name": "f"}</tool_call>',
        ("", "", [("c0", "f", '{"a": "</tool_call>\\""}')]),
    ),
    (of(HERMES), HERMES_F.removesuffix("</tool_call>"), ("", "", [F])),
    (of(HERMES), HERMES_F.removesuffix("call>"), ("", "", [F])),
    (of(LLAMA), LLAMA_F, ("", "", [F])),
    (of(LLAMA), f"<|python_tag|>{LLAMA_F}; {LLAMA_F}", ("", "", [F, ("c1", *F[1:])])),
    (of(LLAMA), f"so {LLAMA_F}", ("", f"so {LLAMA_F}", [])),
    (of(LLAMA), ' {"a": 1} ', ("", ' {"a": 1} ', [])),
    (of(LLAMA), "<|python_tag|>print()", ("", "<|python_tag|>print()", [])),
    (
        of(MISTRAL),
        'so[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}, {"name": "g", "arguments": {}}]',
        ("", "so", [F, ("c1", "g", "{}")]),
    ),
    (
        of(MISTRAL, calling=True, sure=True),
        ' [{"name": "f", "arguments": {"a": "x"}}]',
        ("", "", [F]),
    ),
    (of(QWEN_CODER), CODER_F, ("", "", [("c0", "f", '{"a":"x\\ny","n":5}')])),
    (of(QWEN_CODER, sure=True), CODER_F, ("", "", [("c0", "f", '{"a":"x\\ny","n":5}')])),
    (
        of(HERMES, sure=True),
        f"so\n{HERMES_F}\n{HERMES_G}",
        ("", "so", [F, ("c1", "g", "{}")]),
    ),
    (
        of(HERMES, sure=True),
        HERMES_F.removesuffix('x"}}\n</tool_call>'),
        ("", "", [("c0", "f", '{"a": "')]),
    ),
    (of(LLAMA, sure=True), LLAMA_F, ("", "", [F])),
]
NO_CALLS = [
    (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": "x"}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": oops}}\n</tool_call>'),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}</tool_call> and so'),
    (HERMES, "<tool_call>\nf(1)\n</tool_call>"),
    (HERMES, '<tool_call>\n{"name": "f"'),
    (HERMES, "<tool_call>"),
    (HERMES, " <tool_call> "),
    (HERMES, "<tool_ca"),
    (MISTRAL, "[TOOL_CALLS] f{}"),
    (MISTRAL, "[TOOL_CALLS]"),
    (LLAMA, '{"name": "unknown", "parameters": {}}'),
    (LLAMA, '{"name": "f", "parameters": {}'),
    (QWEN_CODER, "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    (QWEN_CODER, "<tool_call>\n<function=f>\noops\n</function>\n</tool_call>"),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a>"),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_what_a_text_is_read_as(form: Form, text: str, expected: object) -> None:
    assert told(read(form, text)) == expected
    assert told(read(form, *text)) == expected


@pytest.mark.parametrize(("dialect", "text"), NO_CALLS)
def test_what_is_no_call_is_content_as_it_came(dialect: Dialect, text: str) -> None:
    assert told(read(of(dialect), text)) == ("", text, [])
    before = "a\n" if dialect.opening else ""
    assert told(read(of(dialect), before + text)) == ("", before + text, [])


def test_a_call_after_what_is_no_call() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}</tool_call> then {HERMES_F}'
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> then'
    assert told(read(of(HERMES), text)) == ("", broken, [F])


SNIPPETS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[",
     "]", "{", "}", '"', "\\", ",", ";", ":", " ", "\n", "f", "a", HERMES_F, HERMES_G, CODER_F,
     LLAMA_F, '{"name": "f", "arguments": {', '"name": "g"', "<function=f>", "</function>",
     "<parameter=a>", "</parameter>"]
)  # fmt: skip
FORMS = st.builds(
    Form,
    thinks=st.booleans(),
    thinking=st.booleans(),
    dialect=st.sampled_from([None, HERMES, MISTRAL, LLAMA, QWEN_CODER]),
    tools=st.just(TOOLS),
    several=st.booleans(),
    sure=st.booleans(),
)
TEXTS = st.lists(SNIPPETS, max_size=10).map("".join) | st.sampled_from([t for _, t, _ in CASES])


@given(form=FORMS, text=TEXTS, cuts=st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=examples(250))
def test_any_cut_gives_the_same(form: Form, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    expected = told(read(form, text))
    assert told(read(form, *pieces)) == expected
    assert told(read(form, *text)) == expected


@given(form=FORMS, text=TEXTS)
@settings(max_examples=examples(150))
def test_calls_that_may_be_none_come_whole(form: Form, text: str) -> None:
    parts = read(form, *text)
    calls = [part for part in parts if isinstance(part, Called)]
    assert [call.number for call in calls] == list(range(len(calls)))
    if form.sure:
        return
    for call in calls:
        arguments = [p.text for p in parts if isinstance(p, Argued) and p.number == call.number]
        assert len(arguments) == 1
        assert isinstance(json.loads(arguments[0]), dict)
    assert len(parts) >= len(calls) * 2


def test_parts_come_as_soon_as_they_are_certain() -> None:
    reader = ReplyReader(of(HERMES, thinks=True, sure=True), lambda number: f"c{number}")
    assert reader.push("<think>wh") == [Thought("wh")]
    assert reader.thinking
    assert reader.push("y</think>\n\n") == [Thought("y")]
    assert not reader.thinking
    assert reader.push("so <") == [Said("so")]
    assert reader.push("b") == [Said(" <b")]
    assert reader.push('<tool_call>\n{"name": "f",') == []
    assert reader.push(' "arguments": ') == []
    assert reader.push('{"a": "{') == [Called(0, "c0", "f"), Argued(0, '{"a": "{')]
    assert reader.push('x"}}') == [Argued(0, 'x"}')]
    assert reader.push("</tool_call>") == []
    assert reader.flush() == []
