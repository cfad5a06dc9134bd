"""What a reply consists of: thoughts, content and calls of tools, in the order in which they
come."""

from collections.abc import Iterable

import msgspec


class Said(msgspec.Struct, frozen=True, tag=True):
    """Content."""

    text: str


class Thought(msgspec.Struct, frozen=True, tag=True):
    text: str


class Called(msgspec.Struct, frozen=True, tag=True):
    """A call begins."""

    number: int
    """Counts the reply's calls from 0."""
    id: str
    name: str


class Argued(msgspec.Struct, frozen=True, tag=True):
    """The next piece of the JSON of a call's arguments."""

    number: int
    text: str


Part = Said | Thought | Called | Argued


def said(parts: Iterable[Part]) -> str:
    """The content among these parts."""
    return "".join(part.text for part in parts if isinstance(part, Said))


class Call(msgspec.Struct):
    id: str
    name: str
    arguments: str = ""


class Reply:
    """The parts of a reply, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []
        self._calls: list[Called] = []

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case Said(text):
                    self._content.append(text)
                case Thought(text):
                    self._reasoning.append(text)
                case Called():
                    self._calls.append(part)
                    self._arguments.append([])
                case Argued(number, text):
                    self._arguments[number].append(text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[Call]:
        return [
            Call(call.id, call.name, "".join(arguments))
            for call, arguments in zip(self._calls, self._arguments, strict=True)
        ]
