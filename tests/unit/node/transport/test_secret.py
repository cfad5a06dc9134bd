"""Who is let in where the cluster has a secret, and what its file must be."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from services.node.transport.secret import NONCE_BYTES, Secret, load
from services.node.transport.wire import (
    Hello,
    Kind,
    Purpose,
    encode_challenge,
    encode_hello,
    parse_hello,
)
from shared.errors import ConfigError, PeerLost, ProtocolViolation
from tests.support.raw_peer import (
    LIMIT_S,
    STRANGER,
    Node,
    Streams,
    answering,
    closed,
    hello,
    next_frame,
    open_to,
)

OURS, THEIRS = Secret(b"o" * 32), Secret(b"t" * 32)


async def test_nodes_with_the_same_secret_read_of_each_other() -> None:
    source, reader = Node(secret=OURS), Node(secret=OURS)
    async with source.transport, reader.transport:
        source.transport.register("w", memoryview(b"w" * 1000), ready=1000)
        assert await reader.read(source.address) == b"w" * 1000
        await reader.transport.send(source.address, b"header", [b"payload"])
        async with asyncio.timeout(LIMIT_S):
            assert await source.received.get() == (reader.address, b"header", b"payload")


@pytest.mark.parametrize("secret", [None, THEIRS], ids=["without", "another"])
async def test_others_are_let_in_neither_way(secret: Secret | None) -> None:
    ours, stranger = Node(secret=OURS), Node(secret=secret)
    async with ours.transport, stranger.transport:
        for dialler, listener in ((stranger, ours), (ours, stranger)):
            with pytest.raises((PeerLost, ProtocolViolation)):
                await dialler.transport.connect(listener.address)
        friend = Node(secret=OURS)
        async with friend.transport:
            await friend.transport.connect(ours.address)


async def challenged(node: Node) -> tuple[Streams, bytes]:
    streams = await open_to(node)
    async with asyncio.timeout(LIMIT_S):
        prefix, challenge = await next_frame(streams[0])
    assert prefix.kind is Kind.CHALLENGE
    assert len(challenge) == NONCE_BYTES
    return streams, challenge


async def test_a_proof_that_was_seen_is_worth_nothing() -> None:
    """What a node has said to a listener that records it lets nobody into another node."""
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_challenge(b"c" * NONCE_BYTES))
        _, body = await next_frame(reader)
        seen.put_nowait(body)
        await reader.read()

    node, victim = Node(secret=OURS), Node(secret=OURS)
    async with node.transport, victim.transport, answering(record) as recorder:
        victims = asyncio.ensure_future(victim.transport.connect(recorder))
        async with asyncio.timeout(LIMIT_S):
            said = parse_hello(bytearray(await seen.get()))
        streams, _ = await challenged(node)
        streams[1].write(encode_hello(said))
        await closed(streams)
        with pytest.raises((PeerLost, ProtocolViolation)):
            await victims


async def test_whoever_says_something_else_than_was_proved_is_shown_out() -> None:
    node, victim = Node(secret=OURS), Node(secret=OURS)

    async def change(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes everything on, but says that the dialler listens elsewhere."""
        (far_reader, far_writer), challenge = await challenged(node)
        writer.write(encode_challenge(challenge))
        _, body = await next_frame(reader)
        said = parse_hello(bytearray(body))
        changed = Hello(said.purpose, said.instance, STRANGER, said.ways, said.nonce, said.proof)
        far_writer.write(encode_hello(changed))
        await closed((far_reader, far_writer))
        writer.close()

    async with node.transport, victim.transport, answering(change) as between:
        with pytest.raises((PeerLost, ProtocolViolation)):
            await victim.transport.connect(between)
    assert node.dialled.empty()


async def test_a_listener_must_prove_itself_too() -> None:
    async def send_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The dialler's own proof."""
        writer.write(encode_challenge(b"c" * NONCE_BYTES))
        _, body = await next_frame(reader)
        writer.write(encode_hello(parse_hello(bytearray(body))))
        await reader.read()

    node = Node(secret=OURS)
    async with node.transport, answering(send_back) as address:
        with pytest.raises(ProtocolViolation, match="does not prove that it is of this cluster"):
            await node.transport.connect(address)


async def test_a_hello_without_a_proof_gets_no_answer() -> None:
    node = Node(secret=OURS)
    async with node.transport:
        streams, _ = await challenged(node)
        streams[1].write(hello(Purpose.READS))
        await closed(streams)
        async with asyncio.timeout(LIMIT_S):
            _, error = await node.ended.get()
        assert "does not prove" in str(error)


def file(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    loaded = load(file(tmp_path / "secret", b"o" * 32 + b"\n"))
    assert loaded is not None
    assert loaded.proof(b"end", b"said") == OURS.proof(b"end", b"said")
    assert load("") is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: str(path / "none"), "No such file"),
        (lambda path: file(path / "s", b"o" * 32, 0o640), "other users may read"),
        (lambda path: file(path / "s", b"short"), "has 5 bytes, at least 32"),
    ],
)
def test_what_cannot_be_a_secret_is_refused(
    make: Callable[[Path], str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        load(make(tmp_path))
