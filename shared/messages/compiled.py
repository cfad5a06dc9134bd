"""Compiled libraries that nodes give each other."""

from shared.messages.base import Message


class FetchCompiled(Message, frozen=True, kw_only=True, tag="fetch_compiled"):
    """Node -> node: give me this library. Answered with Compiled. NotFound if it is gone."""

    name: str
    """It names everything that the library was made from and for."""


class Compiled(Message, frozen=True, kw_only=True, tag="compiled"):
    name: str
    data: bytes
    digest: str
    """SHA-256 of the data, in hex."""
