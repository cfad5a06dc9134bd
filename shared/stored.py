"""Values in buckets. Another release may have written them, or, in the leases, any node."""

from typing import Any, TypeVar, overload

import msgspec

from shared.errors import BadMessage

T = TypeVar("T")


@overload
def read_stored(value: bytes, kind: type[T]) -> T: ...
@overload
def read_stored(value: bytes, kind: Any) -> Any: ...
def read_stored(value: bytes, kind: Any) -> Any:
    """BadMessage: it is no such value. (msgspec tells damaged text and endless nesting by errors
    that are not its own.)"""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"it cannot be read: {error}") from error
