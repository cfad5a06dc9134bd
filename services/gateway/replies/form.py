"""What a reply may consist of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.replies.dialects import PYTHON_TAG, Dialect

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a reply may consist of, beside content."""

    thinks: bool = False
    """Whether it may begin with thoughts."""
    thinking: bool = False
    """Whether the prompt ends within thoughts."""
    dialect: Dialect | None = None
    """How calls are written; None: there are none."""
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON schema of each tool's parameters."""
    several: bool = True
    """Whether there may be several calls."""
    special: bool = False
    """Whether the opening of calls is a special token."""
    calling: bool = False
    """Whether the prompt ends with the opening of calls."""
    sure: bool = False
    """Whether the text keeps to a grammar of calls."""

    @property
    def plain(self) -> bool:
        """Whether all of it is content."""
        return not (self.thinks or self.thinking) and self.dialect is None

    @property
    def markers(self) -> tuple[str, ...]:
        """What tells the parts apart. Some tokenizers have special tokens for it."""
        tags = (THINK, THOUGHT) if self.thinks or self.thinking else ()
        if self.dialect is None:
            return tags
        own = (self.dialect.opening, self.dialect.closing)
        return (*tags, *own) if self.dialect.opening else (*tags, PYTHON_TAG)

    def call_id(self, digest: bytes) -> str:
        assert self.dialect is not None
        return self.dialect.call_id(digest)
