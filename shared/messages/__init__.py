"""Control messages, one module for each conversation, and their wire form."""

from types import UnionType
from typing import Union, cast

import msgspec

from shared.errors import BadMessage
from shared.messages import (
    access,
    base,
    chronicle,
    compiled,
    copies,
    decisions,
    election,
    instances,
    load,
    pool,
    quotas,
    scaling,
    serving,
    story,
)
from shared.messages.base import ErrorReply, Message, Ok, Ping
from shared.versions import beside, refusal

__all__ = ["ErrorReply", "Message", "Ok", "Ping", "decode", "encode"]

KINDS: tuple[type[Message], ...] = tuple(
    value
    for module in (
        access,
        base,
        chronicle,
        compiled,
        copies,
        decisions,
        election,
        instances,
        load,
        pool,
        quotas,
        scaling,
        serving,
        story,
    )
    for value in vars(module).values()
    if isinstance(value, type)
    and issubclass(value, Message)
    and value is not Message
    and value.__module__ == module.__name__
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(cast(UnionType, Union[KINDS]))  # noqa: UP007 - built at run time


def version(kind: type[Message]) -> int:
    """The version of a message kind that this process speaks: the default of its field `v`."""
    return next(cast(int, f.default) for f in msgspec.structs.fields(kind) if f.name == "v")


_VERSIONS = {kind: version(kind) for kind in KINDS}


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`. A field that is unknown here is ignored, a missing field has its
    default. BadMessage if the kind or the version is unknown, or a field without default is
    missing."""
    try:
        message = cast(Message, _decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"malformed message: {error}") from error
    current = _VERSIONS[type(message)]
    if message.v != current and message.v not in beside(current):
        tag = type(message).__struct_config__.tag
        raise BadMessage(refusal(f"message kind {tag!r}", message.v, current))
    return message
