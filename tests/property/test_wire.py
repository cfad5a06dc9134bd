"""The data plane's wire format: what is encoded comes back; anything else is one typed error."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.node.transport.direct import Place
from services.node.transport.wire import (
    MAX_BODY,
    MAX_MESSAGE,
    PREFIX_BYTES,
    Hello,
    Kind,
    Prefix,
    Purpose,
    ReadRequest,
    encode_fault,
    encode_grant,
    encode_hello,
    encode_prefix,
    encode_read,
    parse_fault,
    parse_grant,
    parse_hello,
    parse_prefix,
    parse_read,
)
from shared.errors import ProtocolViolation

LIMIT = 1 << 20
U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)

WAYS = st.dictionaries(TEXT, st.binary(max_size=40), max_size=3)


def split(frame: bytes) -> tuple[Prefix, bytes]:
    prefix = parse_prefix(frame[:PREFIX_BYTES], max_payload=LIMIT)
    body = frame[PREFIX_BYTES:]
    assert prefix.body == len(body)
    return prefix, body


@given(st.sampled_from(Purpose), U64, TEXT, WAYS)
def test_hello(purpose: Purpose, instance: int, address: str, ways: dict[str, bytes]) -> None:
    hello = Hello(purpose, instance, address, ways)
    prefix, body = split(encode_hello(hello))
    assert prefix.kind is Kind.HELLO
    assert parse_hello(body) == hello


@given(U32, st.integers(-(1 << 31), (1 << 31) - 1), U64, st.integers(1, (1 << 64) - 1), TEXT)
def test_read(id: int, priority: int, offset: int, nbytes: int, region: str) -> None:
    request = ReadRequest(priority, offset, nbytes, region)
    prefix, body = split(encode_read(id, request))
    assert (prefix.kind, prefix.id) == (Kind.READ, id)
    assert parse_read(body) == request


@given(U32, U32, U64, st.integers(1, (1 << 64) - 1))
def test_grant(id: int, key: int, address: int, nbytes: int) -> None:
    prefix, body = split(encode_grant(id, Place(key, address), nbytes))
    assert (prefix.kind, prefix.id) == (Kind.GRANT, id)
    assert parse_grant(body) == (Place(key, address), nbytes)


@given(U32, st.from_regex(r"[a-z_]+", fullmatch=True), TEXT)
def test_fault(id: int, code: str, message: str) -> None:
    prefix, body = split(encode_fault(id, code, message))
    assert (prefix.kind, prefix.id) == (Kind.FAULT, id)
    assert parse_fault(body) == (code, message)


@given(U32, st.integers(1, LIMIT))
def test_data(id: int, payload: int) -> None:
    prefix, _ = split(encode_prefix(Kind.DATA, id=id, payload=payload))
    assert prefix == Prefix(Kind.DATA, id, 0, payload)


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
@example(b"GET / HTTP/1.1\r\nHost")
def test_any_prefix_is_within_the_limits_or_refused(data: bytes) -> None:
    try:
        prefix = parse_prefix(data, max_payload=LIMIT)
    except ProtocolViolation:
        return
    assert prefix.body <= MAX_BODY
    assert prefix.payload <= LIMIT


@given(st.sampled_from(Kind), U32, U32, U64)
def test_lying_lengths(kind: Kind, id: int, body: int, payload: int) -> None:
    try:
        prefix = parse_prefix(
            encode_prefix(kind, id=id, body=body, payload=payload), max_payload=LIMIT
        )
    except ProtocolViolation:
        return
    assert prefix == Prefix(kind, id, body, payload)
    assert body <= MAX_BODY
    assert payload <= LIMIT


@given(st.binary(max_size=PREFIX_BYTES - 1))
def test_truncated_prefix(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_prefix(data, max_payload=LIMIT)


@given(st.binary(max_size=200))
def test_any_body_parses_or_is_refused(body: bytes) -> None:
    for parser in (parse_hello, parse_read, parse_grant, parse_fault):
        try:
            parser(body)
        except ProtocolViolation:
            continue


frames = st.one_of(
    st.builds(encode_hello, st.builds(Hello, st.sampled_from(Purpose), U64, TEXT, WAYS)),
    st.builds(
        encode_read,
        U32,
        st.builds(
            ReadRequest,
            st.integers(-(1 << 31), (1 << 31) - 1),
            U64,
            st.integers(1, (1 << 64) - 1),
            TEXT,
            st.booleans(),
        ),
    ),
    st.builds(encode_grant, U32, st.builds(Place, U32, U64), st.integers(1, (1 << 64) - 1)),
    st.builds(encode_fault, U32, TEXT, TEXT),
)


@given(frames, st.data())
def test_a_damaged_frame_is_refused_or_is_another_whole_one(
    frame: bytes, data: st.DataObject
) -> None:
    """What is made of it can be said, and is understood the same."""
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        prefix = parse_prefix(damaged[:PREFIX_BYTES], max_payload=LIMIT)
        understood = parse(prefix.kind, damaged[PREFIX_BYTES : PREFIX_BYTES + prefix.body])
    except ProtocolViolation:
        return
    again, body = split(encode(prefix, understood))
    assert (again.kind, again.id) == (prefix.kind, prefix.id)
    assert parse(again.kind, body) == understood


Body = Hello | ReadRequest | tuple[Place, int] | tuple[str, str] | bytes


def parse(kind: Kind, body: bytes | bytearray) -> Body:
    if kind is Kind.HELLO:
        return parse_hello(body)
    if kind is Kind.READ:
        return parse_read(body)
    if kind is Kind.GRANT:
        return parse_grant(body)
    if kind is Kind.FAULT:
        return parse_fault(body)
    return bytes(body)


def encode(prefix: Prefix, body: Body) -> bytes:
    match body:
        case Hello():
            return encode_hello(body)
        case ReadRequest():
            return encode_read(prefix.id, body)
        case (Place() as place, int(nbytes)):
            return encode_grant(prefix.id, place, nbytes)
        case (str(code), str(message)):
            return encode_fault(prefix.id, code, message)
        case _:
            assert isinstance(body, bytes)
            return encode_prefix(prefix.kind, id=prefix.id, body=len(body)) + body


@given(TEXT)
def test_a_long_message_of_a_fault_is_cut(message: str) -> None:
    """A peer's own words may come back in it, and must not be too long to be sent."""
    _, body = split(encode_fault(1, "x", message * MAX_MESSAGE))
    assert parse_fault(body) == ("x", (message * MAX_MESSAGE)[:MAX_MESSAGE])


@given(U64, st.binary(max_size=40), st.integers(0, 60))
def test_truncated_bodies(instance: int, garbage: bytes, cut: int) -> None:
    _, body = split(encode_hello(Hello(Purpose.READS, instance, "tcp://a:1")))
    try:
        found = parse_hello(body[:cut] + garbage)
    except ProtocolViolation:
        return
    assert found.purpose in Purpose


def test_another_version_is_named() -> None:
    _, body = split(encode_hello(Hello(Purpose.READS, 1, "tcp://a:1")))
    other = body[:4] + (99).to_bytes(2, "big") + body[6:]
    with pytest.raises(ProtocolViolation, match="version 99"):
        parse_hello(other)
