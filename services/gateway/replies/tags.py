"""Calls that are written with tags: <function=name>, and <parameter=key> around each argument."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

FUNCTION_END = "</function>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>", re.ASCII)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.ASCII | re.DOTALL)


class TaggedCall(NamedTuple):
    name: str
    arguments: str
    """JSON."""


def tagged_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> TaggedCall | None:
    """The call in a text that ends before `</function>`; None if it is none of a known tool.
    `tools`: the schema of each tool's parameters."""
    begin = _FUNCTION.match(text)
    if begin is None or begin[1] not in tools:
        return None
    properties = tools[begin[1]].get("properties") or {}
    arguments: dict[str, Any] = {}
    at = begin.end()
    while found := _PARAMETER.match(text, at):
        key = found[1]
        arguments[key] = _value(found[2], properties.get(key))
        at = found.end()
    if text[at:].strip():
        return None
    return TaggedCall(begin[1], msgspec.json.encode(arguments).decode())


def is_text(schema: object) -> bool:
    """Whether the values of a schema are texts, which are written without quotes."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _value(text: str, schema: object) -> Any:
    if is_text(schema):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
