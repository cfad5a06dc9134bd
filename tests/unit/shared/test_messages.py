"""Every message kind crosses the wire unchanged, in a form that any msgpack reader understands."""

from typing import cast

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadMessage
from shared.ids import Generation, NodeId, RequestId
from shared.messages import KINDS, Message, decode, encode, version
from shared.messages.pool import NodeGone
from shared.messages.serving import Cancel, Token
from tests.support.amounts import examples
from tests.support.malformed import well_framed

by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))


WHOLE = {kind: well_framed(kind, nan=False) for kind in KINDS}
"""Without NaN, which equals nothing."""
ANY = {kind: well_framed(kind) for kind in KINDS}
messages = st.sampled_from(KINDS).flatmap(WHOLE.__getitem__)


@by_kind
def test_a_kind_has_a_tag_of_its_own(kind: type[Message]) -> None:
    tags = [other.__struct_config__.tag for other in KINDS]
    assert tags.count(kind.__struct_config__.tag) == 1


@by_kind
@settings(max_examples=examples(6))
@given(data=st.data())
def test_a_message_comes_back_as_it_was(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(WHOLE[kind])
    assert decode(encode(message)) == message


@by_kind
@settings(max_examples=5)
@given(data=st.data())
def test_another_implementation_reads_and_writes_the_same(
    kind: type[Message], data: st.DataObject
) -> None:
    """The envelope is whole: a reader without our defaults finds kind, version and trace."""
    message = data.draw(WHOLE[kind])
    read = msgpack.unpackb(encode(message), strict_map_key=False)
    assert read["kind"] == type(message).__struct_config__.tag
    assert read["v"] == version(type(message))
    assert read["trace"] == message.trace
    assert decode(msgpack.packb(read)) == message


def test_the_wire_form_is_pinned() -> None:
    data = encode(Cancel(request=RequestId("r-1"), attempt=2))
    assert msgpack.unpackb(data) == {
        "kind": "cancel",
        "v": 1,
        "trace": "",
        "cause": "",
        "term": None,
        "request": "r-1",
        "attempt": 2,
    }


def test_tokens_are_arrays_on_the_wire() -> None:
    token = Token(RequestId("r-1"), 2, 3, 4, "stop")
    on_the_wire = ["r-1", 2, 3, 4, "stop", None, 0, b"", False]
    assert msgpack.unpackb(msgspec.msgpack.encode(token)) == on_the_wire


@given(message=messages)
def test_a_field_added_by_a_later_release_is_ignored(message: Message) -> None:
    raw = cast(dict[str, object], msgpack.unpackb(encode(message), strict_map_key=False))
    assert decode(msgpack.packb(raw | {"added_later": [1, {"x": None}]})) == message


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"kind": "cancel", "v": 3, "request": "r", "attempt": 1}, "version 3.*speaks 1"),
        ({"kind": "from_the_future", "v": 1}, "from_the_future"),
        ({"v": 1}, "kind"),
        ({"kind": "cancel", "v": 1, "request": "r"}, "attempt"),
        ({"kind": "cancel", "v": 1, "request": "r", "attempt": "one"}, "attempt"),
        ([1, 2], "object"),
    ],
)
def test_what_does_not_fit_is_refused(raw: object, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        decode(msgpack.packb(raw))


@given(data=st.binary(max_size=64))
def test_junk_is_a_bad_message_and_nothing_else(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


@given(message=messages, cut=st.integers(min_value=1, max_value=32))
def test_a_truncated_message_is_a_bad_message(message: Message, cut: int) -> None:
    with pytest.raises(BadMessage):
        decode(encode(message)[:-cut])


def test_a_deeply_nested_message_is_a_bad_message() -> None:
    with pytest.raises(BadMessage):
        decode(b"\x91" * 100_000 + b"\x90")


def test_text_that_is_not_utf8_is_a_bad_message() -> None:
    data = encode(NodeGone(node=NodeId("aaaa"), generation=Generation(1), reason="bbbb"))
    assert data.count(b"bbbb") == 1
    with pytest.raises(BadMessage):
        decode(data.replace(b"bbbb", b"\xff\xff\xff\xff"))


@by_kind
@settings(max_examples=examples(6))
@given(data=st.data())
def test_what_means_nothing_passes_the_decoder(kind: type[Message], data: st.DataObject) -> None:
    """So that the tests of boundaries (tests/support/malformed.py) test what can arrive."""
    message = data.draw(ANY[kind])
    assert type(decode(encode(message))) is kind
