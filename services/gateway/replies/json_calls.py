"""Calls that are written as JSON: an object with the name and the arguments."""

import re
from collections.abc import Container

import msgspec

HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
"""A call, up to its arguments."""
_NONE = msgspec.Raw()


class JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = _NONE
    parameters: msgspec.Raw = _NONE

    @property
    def json(self) -> str:
        """Of the arguments."""
        return (bytes(self.arguments) or bytes(self.parameters) or b"{}").decode()


def json_call(text: str, tools: Container[str]) -> JsonCall | None:
    """The call; None if it is none of a known tool."""
    try:
        call = msgspec.json.decode(text, type=JsonCall)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return call if call.name in tools and call.json.startswith("{") else None
