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


class Run:
    """Parts of one kind that follow each other, or one call."""

    def __init__(self, number: int, kind: type[Said] | type[Thought] | type[Called]) -> None:
        """`number`: counts the reply's runs from 0."""
        self.number = number
        self.kind = kind
        self.id = self.name = ""
        """Of a call."""
        self._pieces: list[str] = []

    def grow(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def text(self) -> str:
        """Of a call: the JSON of its arguments."""
        return "".join(self._pieces)


class Began(msgspec.Struct, frozen=True):
    run: Run


class Grew(msgspec.Struct, frozen=True):
    run: Run
    text: str
    """What is new."""


class Ended(msgspec.Struct, frozen=True):
    run: Run


Step = Began | Grew | Ended


class Reply:
    """The parts of a reply, put together."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._open = False
        """Whether the last of them goes on."""

    def add(self, parts: Iterable[Part]) -> list[Step]:
        """What the parts change."""
        steps: list[Step] = []
        for part in parts:
            if isinstance(part, Called):
                steps += self._begin(Called)
                self.runs[-1].id, self.runs[-1].name = part.id, part.name
                continue
            if not isinstance(part, Argued) and not self._goes_on(type(part)):
                steps += self._begin(type(part))
            self.runs[-1].grow(part.text)
            steps.append(Grew(self.runs[-1], part.text))
        return steps

    def end(self) -> list[Step]:
        """No part follows."""
        open_, self._open = self._open, False
        return [Ended(self.runs[-1])] if open_ else []

    def _goes_on(self, kind: type[Said] | type[Thought]) -> bool:
        return self._open and self.runs[-1].kind is kind

    def _begin(self, kind: type[Said] | type[Thought] | type[Called]) -> list[Step]:
        steps = self.end()
        self.runs.append(Run(len(self.runs), kind))
        self._open = True
        return [*steps, Began(self.runs[-1])]

    @property
    def content(self) -> str:
        return "".join(run.text for run in self.runs if run.kind is Said)

    @property
    def reasoning(self) -> str:
        return "".join(run.text for run in self.runs if run.kind is Thought)

    @property
    def calls(self) -> list[Call]:
        return [Call(run.id, run.name, run.text) for run in self.runs if run.kind is Called]
