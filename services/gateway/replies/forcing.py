"""Grammars of replies with thoughts and calls of tools, in llguidance's Lark.

Thoughts are free. Where calls are up to the model, text is free until a call's opening, and from
there on the text is a call of a tool that exists, by the schema of its parameters.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.bodies import FunctionTool
from services.gateway.replies.dialects import Dialect
from services.gateway.replies.form import THINK, THOUGHT, Form
from services.gateway.replies.tags import is_text
from services.gateway.replies.tools import ToolUse
from shared import grammar
from shared.errors import BadInput


def grammar_of_reply(form: Form, use: ToolUse | None, answer: str) -> str:
    """The grammar of a whole reply. `answer`: that of its content, if it has one; without it, and
    without calls, the reply has none (an empty text)."""
    found = answer if use is None or form.dialect is None else _with_calls(form, use, answer)
    if not found or not (form.thinks or form.thinking):
        return found
    thought = f'"{THINK}" thought SPACE' if form.thinks else "thought SPACE"
    lark = f"""
start: ({thought}){"?" if form.thinks else ""} @reply
thought[lazy]: {_until(THOUGHT)}
SPACE: /[ \\n]*/
"""
    return grammar.around(lark, {"reply": found})


def _with_calls(form: Form, use: ToolUse, answer: str) -> str:
    assert form.dialect is not None
    several = use.several and form.dialect.several
    lark = _calls(form.dialect, use)
    calls = _forced(form, several)
    if use.required:
        return grammar.from_lark(f"start: {calls}\n{lark}")
    if answer:
        return grammar.around(f"start: calls | @answer\ncalls: {calls}\n{lark}", {"answer": answer})
    return grammar.from_lark(_free(form.dialect, several) + lark)


def _forced(form: Form, several: bool) -> str:
    """Nothing but calls."""
    dialect = form.dialect
    assert dialect is not None
    opening = "" if form.calling else _text(dialect.opening)
    more = f"({_text(dialect.between)} " if several else ""
    if dialect.listed:
        return f'{opening} SPACES "[" call {more + "call)*" if more else ""} "]"'
    if not dialect.closing:
        return f"call {more + 'call)*' if more else ''}"
    unit = f"{_text(dialect.opening)} rest"
    return f"{opening} rest {more + unit + ')*' if more else ''}"


def _free(dialect: Dialect, several: bool) -> str:
    """Text with calls wherever one is opened."""
    if not dialect.opening:
        return (
            "start: FREE | call\n"
            'FREE: /(?s:.*)/ & ~/(?s:\\s*\\{\\s*"name".*)/\n'
        )  # fmt: skip
    opening = _pattern(dialect.opening)
    rest = 'SPACES "[" call (", " call)* "]"' if dialect.listed else "rest"
    often = "*" if several and not dialect.listed else "?"
    return f"""
start: (opened {rest}){often} FREE
opened[lazy]: {_until(dialect.opening)}
FREE: /(?s:.*)/ & ~/(?s:.*){opening}(?s:.*)/
"""


def _calls(dialect: Dialect, use: ToolUse) -> str:
    """The rules `call`, one of the tools, and `rest`, what follows an opening."""
    written = _tagged if dialect.tagged else _json
    tools = [tool.function for tool in use.callable]
    lines = [f"call: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
    lines += [f"call{i}: {written(tool, dialect, i)}" for i, tool in enumerate(tools)]
    if dialect.closing:
        before, after = _text(dialect.before), _text(dialect.after + dialect.closing)
        lines.append(f"rest: {before} call {after}")
    return "\n".join((*lines, "SPACES: / ?/\n"))


def _json(tool: FunctionTool, dialect: Dialect, number: int) -> str:
    head = f'{{"name": "{tool.name}", "{dialect.arguments}": '
    return f"{_text(head)} {_schema({'type': 'object', **tool.schema})} {_text('}')}"


def _tagged(tool: FunctionTool, dialect: Dialect, number: int) -> str:
    properties = tool.schema.get("properties") or {}
    required = tool.schema.get("required") or ()
    names = {"$defs", "definitions"} & tool.schema.keys()
    shared = {key: tool.schema[key] for key in names}
    parts, rules = [], []
    for place, (key, schema) in enumerate(properties.items()):
        if not key or set(key) & set("<>\n"):
            raise BadInput(f"the parameter {key[:40]!r} cannot be written with tags")
        name = f"value{number}x{place}"
        parts.append(f"{_text(f'<parameter={key}>' + chr(10))} {name}")
        if key not in required:
            parts[-1] = f"({parts[-1]})?"
        rules.append(_value(name, schema, shared))
    head = _text(f"<function={tool.name}>\n")
    return "\n".join((f"{head} {' '.join(parts)} {_text('</function>')}", *rules))


def _value(name: str, schema: Any, shared: Mapping[str, Any]) -> str:
    end = "\n</parameter>\n"
    if not isinstance(schema, dict):
        schema = {}
    if not is_text(schema):
        return f"{name}: {_schema({**schema, **shared})} {_text(end)}"
    if texts := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return f"{name}: ({' | '.join(_text(str(text)) for text in texts)}) {_text(end)}"
    return f"{name}[lazy]: {_until(end)}"


def _schema(schema: Mapping[str, Any]) -> str:
    spaces = {"whitespace_pattern": grammar.SPACES}
    return "%json " + msgspec.json.encode({"x-guidance": spaces, **schema}).decode()


def _until(end: str) -> str:
    """Any text up to this one."""
    return f"/(?s:.*){_pattern(end)}/"


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()
