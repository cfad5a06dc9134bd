"""The envelope of every control message: a kind, a version, the trace it belongs to.

A message is a frozen msgspec struct encoded as a msgpack map with `kind` (the struct's tag), `v`
(its version), `trace` (W3C traceparent of the span that caused it, or "") and `cause` (the id of
the event that made its sender say it, or ""). Fields may be added with defaults within a version;
anything else is a new version.
"""

import msgspec

from shared.errors import LambdaScaleError, from_code


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    v: int = 1
    trace: str = ""
    cause: str = ""


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    """Done. There is nothing more to say."""


class ErrorReply(Message, frozen=True, kw_only=True, tag="error"):
    """The request was refused or failed. `code` is the code of a `shared.errors` class."""

    code: str
    message: str

    @classmethod
    def of(cls, error: LambdaScaleError) -> "ErrorReply":
        return cls(code=error.code, message=str(error))

    def error(self) -> LambdaScaleError:
        return from_code(self.code, self.message)


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Asks whether a service is there. Every service answers Ok."""
