"""What the relay loop in C knows of the protocol is what wire.py says."""

import ctypes
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.node import compiling
from services.node.checkpoints.packing import digest
from services.node.transport import native
from services.node.transport.wire import (
    PREFIX_BYTES,
    Kind,
    Prefix,
    encode_prefix,
    parse_prefix,
)
from shared.errors import ProtocolViolation
from shared.layout import DIGEST_BYTES
from tests.support.raw_peer import Node

U32, U63 = (1 << 32) - 1, (1 << 63) - 1


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = native.load()
    assert loaded is not None
    return loaded


def test_processors_of_other_machines_have_the_same_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = compiling.place("relay", native.SOURCES, native.HEADERS, native.FLAGS)
    monkeypatch.setattr(compiling, "_processor", lambda: "another")
    assert compiling.place("relay", native.SOURCES, native.HEADERS, native.FLAGS) == here


def decoded(library: ctypes.CDLL, head: bytes) -> tuple[int, int] | None:
    identity, payload = ctypes.c_int64(), ctypes.c_int64()
    good = library.decode_data(head, ctypes.byref(identity), ctypes.byref(payload))
    return (identity.value, payload.value) if good else None


def parsed(head: bytes) -> tuple[int, int] | None:
    """(id, payload) of the prefix of a DATA frame; None: of any other, or of nonsense."""
    try:
        prefix = parse_prefix(head, max_payload=U63)
    except ProtocolViolation:
        return None
    return (prefix.id, prefix.payload) if prefix.kind is Kind.DATA else None


@given(identity=st.integers(0, U32), payload=st.integers(1, U63))
def test_it_writes_the_prefix_of_data(library: ctypes.CDLL, identity: int, payload: int) -> None:
    head = ctypes.create_string_buffer(PREFIX_BYTES)
    library.encode_data(head, identity, payload)
    assert head.raw == encode_prefix(Kind.DATA, id=identity, payload=payload)
    assert parse_prefix(head.raw, max_payload=U63) == Prefix(Kind.DATA, identity, 0, payload)


@given(head=st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
@example(head=encode_prefix(Kind.DATA, id=3))
@example(head=encode_prefix(Kind.DATA, id=3, payload=U63))
@example(head=encode_prefix(Kind.DATA, id=3, body=1, payload=1))
@example(head=encode_prefix(Kind.DATA, id=3, payload=(1 << 64) - 1))
@example(head=encode_prefix(Kind.HEARTBEAT))
def test_it_takes_for_data_what_is_data(library: ctypes.CDLL, head: bytes) -> None:
    assert decoded(library, head) == parsed(head)


@given(
    kind=st.sampled_from(Kind), identity=st.integers(0, U32), body=st.integers(0, 2),
    payload=st.integers(0, U63),
)  # fmt: skip
def test_it_takes_no_other_frame_for_data(
    library: ctypes.CDLL, kind: Kind, identity: int, body: int, payload: int
) -> None:
    head = encode_prefix(kind, id=identity, body=body, payload=payload)
    assert decoded(library, head) == parsed(head)


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load.cache_clear()
    yield
    native.load.cache_clear()


async def reads_all_the_same() -> None:
    node = Node()
    async with node.transport:
        node.transport.register("w", memoryview(bytearray(b"w" * 1000)), ready=1000)
        assert await node.read(node.address) == b"w" * 1000


async def test_without_a_compiler(
    unloaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.load() is None
    await reads_all_the_same()


SIZES = [0, 1, 64, 1023, 1024, 1025, 2048, 2049, 3072, 16384, 16385, 17408, 32768, 33024, 262144]


@given(
    nbytes=st.one_of(st.sampled_from(SIZES), st.integers(0, 400_000)),
    parts=st.lists(st.integers(1, 70_000), min_size=1, max_size=8),
    seed=st.integers(0, U32),
)
def test_its_digest_is_that_of_python(
    library: ctypes.CDLL, nbytes: int, parts: list[int], seed: int
) -> None:
    data = random.Random(seed).randbytes(nbytes)
    found = ctypes.create_string_buffer(DIGEST_BYTES)
    state = library.digest_new(nbytes)
    for _ in range(2):  # the end of a digest begins a new one
        position, sizes = 0, itertools.cycle(parts)
        while position < nbytes:
            part = data[position : position + next(sizes)]
            library.digest_update(state, part, len(part))
            position += len(part)
        library.digest_end(state, found)
        assert found.raw == digest(data)
    library.digest_free(state)


async def test_a_region_may_be_shown_after_its_transport_has_ended() -> None:
    node = Node()
    async with node.transport:
        node.transport.register("w", memoryview(bytearray(b"w" * 1000)), ready=500)
        assert await node.read(node.address, nbytes=500) == b"w" * 500
    node.transport.advance("w", 1000)
    await node.transport.unregister("w")
