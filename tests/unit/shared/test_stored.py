"""Stored values that nobody can read."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadMessage
from shared.messages.pool import ModelSet
from shared.stored import read_stored

DEEP = b"\x81\xa4name" + b"\x91" * 100_000
"""Lists in lists, which never end."""
NO_TEXT = b"\x81\xa4name\xa1\xff"


def test_what_is_stored_is_read() -> None:
    assert read_stored(msgspec.msgpack.encode(7), int) == 7


@pytest.mark.parametrize("value", [b"", b"\xc1", b"\x80", DEEP, NO_TEXT, b"\xc0"])
def test_what_cannot_be_read_is_a_typed_error(value: bytes) -> None:
    with pytest.raises(BadMessage, match="cannot be read"):
        read_stored(value, ModelSet)


@given(value=st.binary(max_size=60))
def test_any_bytes_are_a_number_or_a_typed_error(value: bytes) -> None:
    with suppress(BadMessage):
        assert isinstance(read_stored(value, int), int)
