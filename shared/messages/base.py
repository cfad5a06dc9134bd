"""The envelope of every control message: a kind, a version, the trace it belongs to.

A message is a frozen msgspec struct encoded as a msgpack map with `kind` (the struct's tag), `v`
(its version), `trace` (W3C traceparent of the span that caused it, or ""), `cause` (the id of the
event that made its sender say it, or "") and `term` (whose word it is, where only one process of a
role may speak). Fields may be added with defaults within a version. How anything else changes, so
that two releases understand each other, is in CONTRIBUTING.md.

No cause is named by `Tokens` (one message carries the tokens of many requests, and names each), nor
by reports that are said because their time has come.
"""

import msgspec

from shared.errors import LambdaScaleError, ServiceFailed, from_code

MAX_ERROR_CHARS = 4096
"""An error may quote what it was given, and that may be as large as a message can be."""


class Term(msgspec.Struct, frozen=True, array_like=True):
    """The active process of a role, which speaks for it (`shared/election`)."""

    role: str
    number: int
    """A later process has a greater number."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    v: int = 1
    trace: str = ""
    cause: str = ""
    term: Term | None = None

    @property
    def origin(self) -> str:
        """The cause to name for what this message leads to: its own cause, or else its kind."""
        return self.cause or str(self.__struct_config__.tag)


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    """Done. There is nothing more to say."""


class ErrorReply(Message, frozen=True, kw_only=True, tag="error"):
    """The request was refused or failed. `code` is the code of a `shared.errors` class."""

    code: str
    message: str

    @classmethod
    def of(cls, error: LambdaScaleError) -> "ErrorReply":
        text = str(error)[:MAX_ERROR_CHARS]
        return cls(code=error.code, message=text.encode(errors="replace").decode())

    def error(self) -> LambdaScaleError:
        """The typed error; ServiceFailed if this process knows no type of that code."""
        error = from_code(self.code, self.message)
        return error if type(error) is not LambdaScaleError else ServiceFailed(self.message)


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Asks whether a service is there. Every service answers Ok."""
