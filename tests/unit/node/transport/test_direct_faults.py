"""Faults of shared memory between nodes: grants that lie, takers that never say so or die, memory
that is not to be had or not to be trusted. Reads end in a typed error, or come another way."""

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from services.node.memory.arena import Arena
from services.node.transport import reads
from services.node.transport.direct import Place
from services.node.transport.shm import MAX_MEMORIES, ShmDirect
from services.node.transport.wire import (
    CANCELLED,
    Kind,
    Prefix,
    Purpose,
    ReadRequest,
    encode_fault,
    encode_grant,
    encode_prefix,
    encode_read,
    parse_fault,
    parse_grant,
)
from shared.errors import PeerLost, ProtocolViolation, TransportError
from tests.support.raw_peer import (
    LIMIT_S,
    STRANGER,
    Node,
    Streams,
    beat,
    closed,
    dial,
    impostor,
    leave,
    next_frame,
)

MIB = 1 << 20
MACHINE = "here"
NBYTES = 1000
"""The size of a read."""


class Sharing:
    """A node that shares its arena, in which `w` lies at the beginning."""

    def __init__(self, rate: int) -> None:
        self.arena = Arena(4 * MIB)
        shm = ShmDirect([self.arena.memory], machine=MACHINE, bytes_per_s=rate)
        self.node = Node(ways=[shm])
        self.memory = self.arena.allocate(2 * MIB).memory
        self.memory[:] = b"w" * len(self.memory)
        self.room = self.arena.allocate(MIB).memory

    async def read(self, address: str, nbytes: int = NBYTES) -> tuple[bytes, str]:
        """What was read, and how it came."""
        into = self.room[:nbytes]
        async with asyncio.timeout(LIMIT_S):
            result = await self.node.transport.read(address, "w", 0, into, priority=1)
        return bytes(into), result.way


@asynccontextmanager
async def sharing(rate: int = 0) -> AsyncIterator[Sharing]:
    shared = Sharing(rate)
    async with shared.node.transport:
        shared.node.transport.register("w", shared.memory, ready=len(shared.memory))
        yield shared


@pytest.fixture
async def own() -> AsyncIterator[Sharing]:
    async with sharing() as shared:
        yield shared


def offer(shared: Sharing) -> dict[str, bytes]:
    """As another node of this machine would make it."""
    (way,) = shared.node.transport._ways.values()
    return {"shm": way.offer().data}


async def dial_direct(shared: Sharing) -> Streams:
    return await dial(shared.node, Purpose.READS, ways=offer(shared))


def ask(identity: int, nbytes: int = NBYTES) -> bytes:
    return encode_read(identity, ReadRequest(1, 0, nbytes, "w", True))


def taken(identity: int) -> bytes:
    return encode_prefix(Kind.TAKEN, id=identity)


async def granted(streams: Streams, identity: int) -> int:
    """How many bytes of `w` the node lets the peer take now."""
    prefix, body = await next_frame(streams[0])
    assert (prefix.kind, prefix.id) == (Kind.GRANT, identity)
    return parse_grant(body)[1]


async def told(node: Node) -> TransportError:
    async with asyncio.timeout(LIMIT_S):
        address, error = await node.ended.get()
    assert address == STRANGER
    return error


async def serves(shared: Sharing) -> None:
    """Fails unless `shared` still serves, by shared memory too: it reads from itself."""
    data, way = await shared.read(shared.node.address)
    assert (data, way) == (b"w" * NBYTES, "shm")


# --- who takes ---------------------------------------------------------------------------------


UNGRANTED: dict[str, Callable[[int], bytes]] = {
    "a read that nobody made": lambda _: taken(9),
    "a read that goes on the connection": lambda _: (
        encode_read(2, ReadRequest(1, 0, 2 * MIB, "w")) + taken(2)
    ),
    "a grant of its own": lambda _: encode_grant(1, Place(0, 0), 10),
    "with a body": lambda _: encode_prefix(Kind.TAKEN, id=1, body=1) + b"1",
}


@pytest.mark.parametrize("said", UNGRANTED.values(), ids=UNGRANTED.keys())
async def test_taken_without_a_grant(own: Sharing, said: Callable[[int], bytes]) -> None:
    streams = await dial_direct(own)
    streams[1].write(ask(1))
    assert await granted(streams, 1) == NBYTES
    streams[1].write(said(1))
    await closed(streams)
    assert isinstance(await told(own.node), ProtocolViolation)
    await serves(own)


async def test_taken_when_the_read_is_over(own: Sharing) -> None:
    streams = await dial_direct(own)
    for identity in (1, 2):
        streams[1].write(ask(identity))
        assert await granted(streams, identity) == NBYTES
        streams[1].write(taken(1))
    await closed(streams)
    assert isinstance(await told(own.node), ProtocolViolation)


async def test_a_taker_that_dies(own: Sharing) -> None:
    """What it was granted is the owner's again."""
    streams = await dial_direct(own)
    for identity in range(5):
        streams[1].write(ask(identity))
    await granted(streams, 0)
    await leave(streams)
    async with asyncio.timeout(LIMIT_S):
        await own.node.transport.unregister("w")
    assert isinstance(await told(own.node), PeerLost)


async def test_a_taker_that_falls_silent(own: Sharing) -> None:
    streams = await dial_direct(own)
    streams[1].write(ask(1))
    await granted(streams, 1)
    await serves(own)
    async with asyncio.timeout(LIMIT_S):
        await own.node.transport.unregister("w")
    assert isinstance(await told(own.node), PeerLost)
    await leave(streams)


async def test_takers_that_take_their_time_hold_up_nobody(own: Sharing) -> None:
    """They live, and never say that they have taken what they were granted."""
    slow = [await dial_direct(own) for _ in range(4)]
    beating = [asyncio.ensure_future(beat(streams[1])) for streams in slow]
    for streams in slow:
        streams[1].write(ask(1))
        await granted(streams, 1)
    await serves(own)
    for task, streams in zip(beating, slow, strict=True):
        task.cancel()
        await leave(streams)


async def test_a_cancel_waits_for_what_was_granted() -> None:
    async with sharing(rate=10_000_000) as own:
        streams = await dial_direct(own)
        streams[1].write(ask(1, 2 * MIB))
        assert await granted(streams, 1) < 2 * MIB
        streams[1].write(encode_prefix(Kind.CANCEL, id=1))
        streams[1].write(ask(2))
        assert await granted(streams, 2) == NBYTES  # the cancel was seen before
        streams[1].write(taken(2) + taken(1))
        prefix, body = await next_frame(streams[0])
        assert (prefix.kind, prefix.id, parse_fault(body)[0]) == (Kind.FAULT, 1, CANCELLED)
        await leave(streams)


async def test_an_offer_from_elsewhere(own: Sharing) -> None:
    """No shared memory between the two: the bytes come on the connection, asked for as they are."""
    streams = await dial(own.node, Purpose.READS, ways={"shm": b"there/boot/net", "magic": b""})
    streams[1].write(ask(1))
    assert await next_frame(streams[0]) == (Prefix(Kind.DATA, 1, 0, NBYTES), b"w" * NBYTES)
    streams[1].write(taken(1))
    await closed(streams)
    assert isinstance(await told(own.node), ProtocolViolation)


# --- who grants ----------------------------------------------------------------------------------


def sharing_that_of(node: Sharing) -> Callable[[Mapping[str, bytes]], Mapping[str, bytes]]:
    """The answer of a peer that shares this node's memory."""
    (shm,) = node.node.transport._ways.values()

    def answer(offers: Mapping[str, bytes]) -> Mapping[str, bytes]:
        accepted = shm.accept(offers["shm"])
        assert accepted is not None
        return {"shm": accepted[0]}

    return answer


@asynccontextmanager
async def granting(
    shared: Sharing, other: Sharing, said: Callable[[int], bytes]
) -> AsyncIterator[str]:
    """A peer that shares the other's memory, and answers each read as told."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            prefix, _ = await next_frame(reader)
            if prefix.kind is Kind.READ:
                writer.write(said(prefix.id))

    async with impostor(reply, answer=sharing_that_of(other)) as address:
        yield address


def grant(key: int, address: int, nbytes: int = NBYTES) -> Callable[[int], bytes]:
    return lambda identity: encode_grant(identity, Place(key, address), nbytes)


async def test_a_grant_that_is_right(own: Sharing) -> None:
    """The grants of the tests below differ from this one, and are refused."""
    async with sharing() as other, granting(own, other, grant(0, 100)) as address:
        assert await own.read(address) == (b"w" * NBYTES, "shm")


LYING: dict[str, Callable[[int], bytes]] = {
    "another memory": grant(1, 0),
    "a memory without end": grant((1 << 32) - 1, 0),
    "across the end": grant(0, 4 * MIB - 10),
    "behind the end": grant(0, 4 * MIB),
    "far away": grant(0, (1 << 64) - 1),
    "half of all numbers": grant(0, 1 << 63),
    "too much": grant(0, 0, NBYTES + 1),
    "without end": grant(0, 0, (1 << 64) - 1),
    "of nothing": grant(0, 0, 0),
    "of a read that nobody made": lambda identity: grant(0, 0)(identity + 1),
    "two at a time": lambda identity: grant(0, 0, 1)(identity) * 2,
    "and data at a time": lambda identity: (
        grant(0, 0, 500)(identity) + encode_prefix(Kind.DATA, id=identity, payload=1) + b"!"
    ),
    "and a refusal at a time": lambda identity: (
        grant(0, 0, 500)(identity) + encode_fault(identity, CANCELLED, "")
    ),
    "again when all is there": lambda identity: grant(0, 0)(identity) * 2,
    "cut short": lambda identity: encode_prefix(Kind.GRANT, id=identity, body=3) + b"abc",
    "with a payload": lambda identity: encode_prefix(Kind.GRANT, id=identity, payload=5) + b"12345",
}


@pytest.mark.parametrize("said", LYING.values(), ids=LYING.keys())
async def test_a_lying_grant(own: Sharing, said: Callable[[int], bytes]) -> None:
    """Nothing is written but what was asked for."""
    own.room[:] = b"-" * len(own.room)
    async with sharing() as other, granting(own, other, said) as address:
        try:
            data, _ = await own.read(address)
        except ProtocolViolation:
            pass
        else:
            assert data == b"w" * NBYTES
        lost, error = await own.node.lost.get()
        assert (lost, type(error)) == (address, ProtocolViolation)
    assert set(own.room[NBYTES:]) == {ord("-")}
    await serves(own)


async def test_grants_of_a_source_that_does_not_read_that_they_were_taken(
    own: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte it could go on for ever: what it is to be told does not pile up."""
    monkeypatch.setattr(reads, "MAX_READS", 8)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix, _ = await next_frame(reader)
        connection = (await own.node.transport._readers.get(address)).connection
        post = connection.post
        posted = asyncio.Semaphore(0)

        def watched(frame: bytes) -> None:
            post(frame)
            posted.release()

        monkeypatch.setattr(connection, "post", watched)
        async with connection._writing:  # as if the kernel took no more
            for _ in range(NBYTES):
                writer.write(grant(0, 0, 1)(prefix.id))
                await posted.acquire()

    async with impostor(drip, answer=sharing_that_of(own)) as address:
        with pytest.raises(ProtocolViolation, match="8 grants"):
            await own.read(address)


async def test_a_grant_without_a_way() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix, _ = await next_frame(reader)
        writer.write(grant(0, 0)(prefix.id))
        await asyncio.Event().wait()

    node = Node()
    async with node.transport, impostor(reply) as address:
        with pytest.raises(ProtocolViolation, match="not direct"):
            await node.read(address)


async def test_an_answer_to_what_was_not_offered(own: Sharing) -> None:
    async def idle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with impostor(idle, answer=lambda _: {"magic": b""}) as address:
        with pytest.raises(ProtocolViolation, match="magic"):
            await own.read(address)


# --- memory that can't be had, or is not what it should be ------------------------------------


def memfd(nbytes: int, *, seals: int = 0) -> int:
    descriptor = os.memfd_create("fault", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def hand_out(count: bytes, make: Callable[[], list[int]]) -> Callable[[socket.socket], None]:
    def hand(peer: socket.socket) -> None:
        descriptors = make()
        socket.send_fds(peer, [count], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    return hand


HANDED: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda peer: peer.close(),
    "no word": lambda peer: None,
    "fewer than said": hand_out(b"\2", lambda: [memfd(MIB, seals=fcntl.F_SEAL_SHRINK)]),
    "more than said": hand_out(b"\0", lambda: [memfd(MIB, seals=fcntl.F_SEAL_SHRINK)]),
    "too many": hand_out(
        bytes([MAX_MEMORIES + 4]),
        lambda: [memfd(MIB, seals=fcntl.F_SEAL_SHRINK) for _ in range(MAX_MEMORIES + 4)],
    ),
    "what may shrink": hand_out(b"\1", lambda: [memfd(MIB)]),
    "what may only not grow": hand_out(b"\1", lambda: [memfd(MIB, seals=fcntl.F_SEAL_GROW)]),
    "of no size": hand_out(b"\1", lambda: [memfd(0, seals=fcntl.F_SEAL_SHRINK)]),
    "a file": hand_out(b"\1", lambda: [os.open(__file__, os.O_RDONLY)]),
    "a device": hand_out(b"\1", lambda: [os.open("/dev/zero", os.O_RDONLY)]),
    "a pipe": hand_out(b"\2", lambda: list(os.pipe())),
}


@pytest.mark.parametrize("hand", HANDED.values(), ids=HANDED.keys())
async def test_memory_that_cannot_be_had(
    own: Sharing, hand: Callable[[socket.socket], object]
) -> None:
    """The bytes come on the connection. What may vanish under a reader's hands is not mapped, and
    no descriptor stays open."""
    name = b"\0fault-" + secrets.token_bytes(8)
    peers: list[socket.socket] = []

    def accept() -> None:
        peers.append(listener.accept()[0])
        hand(peers[-1])

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix, _ = await next_frame(reader)
        writer.write(encode_prefix(Kind.DATA, id=prefix.id, payload=NBYTES) + b"d" * NBYTES)
        await asyncio.Event().wait()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen()
        asyncio.get_running_loop().add_reader(listener, accept)
        async with impostor(reply, answer=lambda _: {"shm": name}) as address:
            assert await own.read(address) == (b"d" * NBYTES, "tcp")
        assert not open_descriptors("memfd:fault")
        asyncio.get_running_loop().remove_reader(listener)
    for peer in peers:
        peer.close()


def open_descriptors(name: str) -> int:
    """How many descriptors of this process are of files so called."""
    links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return sum(name in os.readlink(link) for link in links if os.path.lexists(link))


@pytest.mark.parametrize(
    "answer", [b"", b"\0nobody listens here", b"/nowhere", b"\0" + b"x" * 500, b"\xff\0" * 9]
)
async def test_nobody_hands_memory_out(own: Sharing, answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix, _ = await next_frame(reader)
        writer.write(encode_prefix(Kind.DATA, id=prefix.id, payload=NBYTES) + b"d" * NBYTES)
        await asyncio.Event().wait()

    async with impostor(reply, answer=lambda _: {"shm": answer}) as address:
        assert await own.read(address) == (b"d" * NBYTES, "tcp")


SOURCE = f"""
import asyncio, os, sys
from services.node.memory.arena import Arena
from services.node.transport.base import NoListener
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport

async def main() -> None:
    arena = Arena({4 * MIB})
    transport = TcpTransport(
        "127.0.0.1", 0, link_bytes_per_s=0,
        listener=NoListener(),
        ways=[ShmDirect([arena.memory], machine={MACHINE!r}, bytes_per_s=2_000_000)],
    )
    async with transport:
        memory = arena.allocate({4 * MIB}).memory
        memory[:] = b"w" * len(memory)
        transport.register("w", memory, ready=len(memory))
        try:
            os.ftruncate(arena.memory.descriptor, 0)
        except OSError:
            print(transport.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_an_owner_of_memory_that_dies(own: Sharing, number: signal.Signals) -> None:
    """It dies in the midst of a read. It could not take its memory back (it tried, and there is no
    SIGBUS), and the reader learns of its end by the connection."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SOURCE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            address = (await process.stdout.readline()).decode().strip()
        assert await own.read(address) == (b"w" * NBYTES, "shm")
        reading = asyncio.ensure_future(own.read(address, MIB))
        await own.read(address)  # by the same connection: the other one has begun
        assert not reading.done()
        process.send_signal(number)
        with pytest.raises(PeerLost):
            await reading
        assert (await own.node.lost.get())[0] == address
        own.room[:] = b"-" * len(own.room)
        await serves(own)
        assert set(own.room[NBYTES:]) == {ord("-")}
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
