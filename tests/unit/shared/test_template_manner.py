"""What templates of several families do with tools."""

import pytest

from services.local import demo_tokenizer
from shared.chat_template import ChatTemplate
from shared.template_manner import Manner, manner_of

HEADER = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALL = "{'name': call.function.name, 'arguments': call.function.arguments} | tojson"
HERMES = (
    HEADER + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}"
    "<tool_call>\n{{ " + CALL + " }}\n</tool_call>{% endfor %}{% endfor %}"
)
NO_CONTENT = (
    HEADER + "{% for m in messages %}{% if m.content is none %}{% for call in m.tool_calls %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NO_RESULTS = (
    HEADER + "{% for m in messages if m.role != 'tool' %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ " + CALL + " }}{% endfor %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ m.content }}{% endfor %}"
)


def manner(source: str) -> Manner:
    return manner_of(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


SHOWS_ALL = Manner(tools=True, call="<|assistant|><tool_call>", results=True)
READS_TEXT = Manner(tools=True, call="zqcall", results=True, text_arguments=True, no_content=True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HERMES, SHOWS_ALL),
        (demo_tokenizer.CHAT_TEMPLATE, SHOWS_ALL),
        (NO_CONTENT, READS_TEXT),
        (NO_RESULTS, Manner(tools=True, call='{"name": "zqcall"')),
        (STRICT, Manner()),
        ("no messages", Manner()),
    ],
)
def test_what_a_template_does_with_tools(source: str, expected: Manner) -> None:
    found = manner(source)
    assert found.call.startswith(expected.call)
    assert bool(found.call) == bool(expected.call)
    names = [name for name in Manner.__struct_fields__ if name != "call"]
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]


def test_what_it_writes_for_a_call() -> None:
    said = '<tool_call>\n{"name": "zqcall", "arguments": {"zqkey": "zqvalue"}}\n</tool_call>'
    assert manner(HERMES).call == "<|assistant|>" + said
    assert manner(demo_tokenizer.CHAT_TEMPLATE).call == f"<|assistant|>{said}</s>"
