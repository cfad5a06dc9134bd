"""Fuzzes whole connections of reads, at either end: whatever the other end says, it works or ends
in a TransportError; nothing hangs and nothing is written where it was not asked for.

python -m tests.fuzz.connection [-max_total_time=600] [-runs=100000] [CORPUS_DIRECTORY]
"""

import asyncio
import socket
import sys

import atheris

with atheris.instrument_imports(include=["services.node.transport", "shared.errors"]):
    from services.node.transport.base import NoListener, Permit
    from services.node.transport.connection import Connection
    from services.node.transport.direct import Place
    from services.node.transport.loans import Loans
    from services.node.transport.pacing import Port
    from services.node.transport.reads import ReadChannel, Way, Work
    from services.node.transport.regions import Regions
    from services.node.transport.serving import ReadServer
    from services.node.transport.wire import (
        Kind,
        ReadRequest,
        encode_fault,
        encode_grant,
        encode_prefix,
        encode_read,
    )
    from shared.errors import PeerLost, ProtocolViolation, TransportError

LIMIT_S = 200.0
MAX_PAYLOAD = 1 << 16
REGION = bytes(range(256)) * 16
READY = 1000
SIZES = (1, 50, 700, 1500)
GUARD = 64


class Instant:
    """Both ends of a direct way, whose memory is REGION."""

    name = "instant"

    def __init__(self, *, shares: bool = True) -> None:
        self.closed = False
        self._shares = shares

    def place(self, buffer: memoryview) -> Place | None:
        return Place(0, 0) if self._shares else None

    def reaches(self, into: memoryview) -> bool:
        return len(into) % 2 == 0

    async def take(self, place: Place, into: memoryview) -> None:
        if place.key or place.address + len(into) > len(REGION):
            raise ProtocolViolation("no such place")
        into[:] = REGION[place.address : place.address + len(into)]

    def close(self) -> None:
        self.closed = True


def frame(said: "atheris.FuzzedDataProvider") -> bytes:
    """One that makes sense, or nearly, or not at all."""
    kind = said.ConsumeIntInRange(0, 9)
    identity = said.ConsumeIntInRange(0, 5)
    nbytes: int = said.ConsumeIntInRange(0, 2000)
    if kind == 0:
        noise: bytes = said.ConsumeBytes(said.ConsumeIntInRange(1, 60))
        return noise
    if kind == Kind.READ:
        offset = said.ConsumeIntInRange(0, 5000)
        request = ReadRequest(1, offset, nbytes, "w", said.ConsumeBool())
        return encode_read(identity, request)
    if kind == Kind.DATA:
        return encode_prefix(Kind.DATA, id=identity, payload=nbytes) + b"d" * nbytes
    if kind == Kind.GRANT:
        return encode_grant(identity, Place(0, said.ConsumeIntInRange(0, 5000)), nbytes)
    if kind == Kind.FAULT:
        return encode_fault(identity, "region_unknown", "no")
    if kind in (Kind.CANCEL, Kind.TAKEN, Kind.HEARTBEAT):
        return encode_prefix(Kind(kind), id=0 if kind == Kind.HEARTBEAT else identity)
    body, payload = said.ConsumeIntInRange(0, (1 << 32) - 1), said.ConsumeIntInRange(0, 1 << 63)
    return encode_prefix(Kind(kind), id=identity, body=body, payload=payload)


class Peer:
    """The other end of a connection, and what is done at this one."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        for end in (ours, self._theirs):
            end.setblocking(False)
        self.connection = Connection(ours, "peer", max_payload=MAX_PAYLOAD)
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Work) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work()
            except TransportError as error:
                self.connection.close(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def say(self, data: bytes) -> None:
        """Takes nothing in. Silent once the connection is closed."""
        loop = asyncio.get_running_loop()
        try:
            for said in (data[: len(data) // 2], data[len(data) // 2 :]):
                await loop.sock_sendall(self._theirs, said)
                await asyncio.sleep(0)
        except OSError:
            return

    async def leave(self) -> None:
        """All that is done ends with the connection."""
        self._theirs.close()
        while self._tasks:
            for task in await _done(self._tasks):
                task.result()


async def _done(tasks: "set[asyncio.Task[None]]") -> "set[asyncio.Task[None]]":
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return {task for task in done if not task.cancelled()}


async def serving(said: "atheris.FuzzedDataProvider") -> None:
    peer, way = Peer(), Instant(shares=said.ConsumeBool())
    regions = Regions()
    regions.register("w", memoryview(REGION), READY, "")
    server = ReadServer(
        peer.connection,
        regions,
        Loans(NoListener()),
        Port(0, width=1),
        peer.spawn,
        Way("instant", way, Port(0, width=2)),
        visitor=None,
        on_sent=lambda began, ended, nbytes: None,
    )
    run = peer.spawn(server.run)
    while said.remaining_bytes() and not run.done():
        await peer.say(frame(said))
        if said.ConsumeBool():
            regions.advance("w", min(len(REGION), regions.find("w", 0, 1).ready + 100))
    await peer.leave()
    assert peer.connection.error is not None
    assert way.closed
    await regions.unregister("w")


async def asking(said: "atheris.FuzzedDataProvider") -> None:
    peer, way = Peer(), Instant()
    port = Port(0)
    channel = ReadChannel(peer.connection, port, peer.spawn, Way("instant", way, port), asks=True)
    peer.connection.on_closed = channel.fail
    rooms = [bytearray(b"-" * (size + 2 * GUARD)) for size in SIZES]
    loop = asyncio.get_running_loop()
    reads = [
        loop.create_task(
            channel.read(
                "w",
                0,
                memoryview(room)[GUARD:-GUARD],
                priority=1,
                received=None,
                permit=Permit("w", b"may"),
            )
        )
        for room in rooms
    ]
    run = peer.spawn(channel.run)
    while said.remaining_bytes() and not run.done():
        await peer.say(frame(said))
        cancel = said.ConsumeIntInRange(0, 20)
        if cancel < len(reads):
            reads[cancel].cancel()
    await peer.leave()
    for read, room in zip(reads, rooms, strict=True):
        await asyncio.wait([read])
        assert read.cancelled() or isinstance(read.exception(), TransportError | type(None))
        assert set(room[:GUARD] + room[-GUARD:]) == {ord("-")}
    assert isinstance(peer.connection.error, PeerLost | ProtocolViolation)


def converse(runner: asyncio.Runner, data: bytes) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            said = atheris.FuzzedDataProvider(data)
            await (serving if said.ConsumeBool() else asking)(said)

    runner.run(limited())


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        atheris.Setup(sys.argv, lambda data: converse(runner, data))
        atheris.Fuzz()
