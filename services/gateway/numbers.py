"""Which JSON of a client can go to other processes."""

import msgspec

from services.gateway.api_error import invalid


def check_numbers(value: object, where: str) -> None:
    """ApiError 400: the value, of the field `where`, cannot be sent on."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:
        invalid(where, f"has a number of more than 64 bits, or is nested too deeply: {error}")
