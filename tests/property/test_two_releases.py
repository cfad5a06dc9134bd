"""The last release and this one understand each other, in what they say and in what they store.

The last release is `tests/support/wire_form.json`. A failure here means that a cluster could not be
upgraded while it works: CONTRIBUTING.md, "Change a message", says how to make the change in two
releases instead.
"""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.node.transport import wire
from shared.errors import BadMessage, ProtocolViolation
from shared.messages import KINDS, Message, decode, version
from tests.support.malformed import well_framed
from tests.support.wire_form import ROOTS, Reader, recorded

LAST: dict[str, Any] = Reader(recorded()).roots
by_root = pytest.mark.parametrize("name", sorted(LAST))


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, without NaN, which equals nothing."""
    kinds = get_args(kind) or (kind,)
    return st.one_of(*(well_framed(each, nan=False) for each in kinds))


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(KINDS))
    message: Message = draw(anything(kind))
    return message


def agree(one: Any, other: Any) -> bool:
    """Whether two decoded values say the same as far as both say anything."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(agree(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return all(agree(*pair) for pair in zip(one, other, strict=False))
    return bool(one == other)


def plain(value: object) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), strict=False)


@by_root
@settings(max_examples=5)
@given(data=st.data())
def test_this_release_understands_the_last(name: str, data: st.DataObject) -> None:
    assert name in ROOTS, "a kind is removed in the release after the one that stops saying it"
    said = data.draw(anything(LAST[name]))
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=ROOTS[name])
    assert agree(plain(said), plain(heard))
    if isinstance(heard, Message):
        assert decode(msgspec.msgpack.encode(said)) == heard


@by_root
@settings(max_examples=5)
@given(data=st.data())
def test_the_last_release_understands_this(name: str, data: st.DataObject) -> None:
    said = data.draw(anything(ROOTS[name]))
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=LAST[name])
    assert agree(plain(said), plain(heard))


@given(message=messages())
def test_the_versions_beside_are_taken_and_no_others(message: Message) -> None:
    ours = version(type(message))
    for other in range(ours - 2, ours + 3):
        sent = msgspec.msgpack.encode(plain(message) | {"v": other})
        if other >= 1 and abs(other - ours) <= 1:
            assert decode(sent) == msgspec.structs.replace(message, v=other)
        else:
            with pytest.raises(BadMessage, match=f"version {other}.*one release at a time"):
                decode(sent)


@given(message=messages())
def test_fields_that_the_last_release_has_not_said_take_their_defaults(message: Message) -> None:
    optional = [f for f in msgspec.structs.fields(message) if not f.required and f.name != "v"]
    left_out = {field.encode_name for field in optional}
    said = {name: value for name, value in plain(message).items() if name not in left_out}
    heard = decode(msgspec.msgpack.encode(said))
    for field in optional:
        factory = field.default_factory
        default = field.default if factory is msgspec.NODEFAULT else factory()
        assert getattr(heard, field.name) == default, field.name


@given(version=st.integers(0, 2**16 - 1) | st.integers(wire.OLDEST - 1, wire.VERSION + 2))
def test_the_data_plane_takes_the_next_version_and_no_later_one(version: int) -> None:
    hello = wire.Hello(wire.Purpose.READS, 7, "host:1")
    later = msgspec.msgpack.encode(
        [*msgspec.to_builtins(hello, builtin_types=(bytes,)), "added later"]
    )
    body = wire.MAGIC + version.to_bytes(2, "big") + later
    if wire.OLDEST <= version <= wire.VERSION + 1:
        assert wire.parse_hello(body) == hello
    else:
        with pytest.raises(ProtocolViolation, match=f"version {version}.*one release at a time"):
            wire.parse_hello(body)
