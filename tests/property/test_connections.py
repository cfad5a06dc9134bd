"""Whole connections of the data plane: any frames, right or wrong, cut anyhow, at either end.

What the protocol allows works, to the byte; the first thing that it does not allow ends the
connection, with everything on it. Nothing hangs and nothing is written where it was not asked for.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.node.transport.wire import (
    CANCELLED,
    Kind,
    Prefix,
    Purpose,
    ReadRequest,
    encode_fault,
    encode_prefix,
    encode_read,
    parse_fault,
    parse_read,
)
from shared.errors import (
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
)
from tests.support.raw_peer import LIMIT_S, Node, Streams, dial, impostor, leave, next_frame

REGION = bytes(range(251)) * 12
READY = 1000
PATIENT_S = 60.0
"""No connection of these tests ends because it is silent."""

cuts = st.lists(st.integers(1, 60), max_size=8)
garbage = st.one_of(
    st.binary(min_size=1, max_size=80),
    st.builds(
        encode_prefix,
        st.sampled_from(Kind),
        id=st.integers(0, 5),
        body=st.integers(0, (1 << 32) - 1),
        payload=st.integers(0, (1 << 64) - 1),
    ),
)


async def write(streams: Streams, said: bytes, pieces: Sequence[int]) -> None:
    """Writes `said` in pieces of these sizes, and then the rest."""
    for size in pieces:
        streams[1].write(said[:size])
        said = said[size:]
        await asyncio.sleep(0)
    streams[1].write(said)
    with suppress(ConnectionError):
        await streams[1].drain()


# --- the serving end -----------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    region: str
    offset: int
    nbytes: int

    @property
    def allowed(self) -> bool:
        return self.region == "w" and self.offset + self.nbytes <= len(REGION)


@dataclass(frozen=True)
class Cancel:
    read: int


@dataclass(frozen=True)
class Advance:
    nbytes: int


asks = st.builds(
    Ask, st.sampled_from(["w", "w", "w", "v"]), st.integers(0, 3100), st.integers(1, 3100)
)
script = st.lists(
    st.tuples(
        st.one_of(
            asks,
            asks,
            st.builds(Cancel, st.integers(0, 9)),
            st.builds(Advance, st.integers(0, 500)),
        ),
        cuts,
    ),
    max_size=12,
)


@given(script, st.one_of(st.none(), garbage), cuts)
def test_the_serving_end(
    steps: list[tuple[Ask | Cancel | Advance, list[int]]], last: bytes | None, pieces: list[int]
) -> None:
    asyncio.run(serving(steps, last, pieces))


async def serving(
    steps: list[tuple[Ask | Cancel | Advance, list[int]]], last: bytes | None, pieces: list[int]
) -> None:
    """A peer asks by these steps, and says something wrong at the end unless that is None."""
    node = Node(silence_s=PATIENT_S)
    async with node.transport, asyncio.timeout(LIMIT_S):
        node.transport.register("w", memoryview(REGION), ready=READY)
        streams = await dial(node, Purpose.READS)
        asked: list[Ask] = []
        cancelled: set[int] = set()
        ready = READY
        for step, sizes in steps:
            if isinstance(step, Advance):
                ready = min(ready + step.nbytes, len(REGION))
                node.transport.advance("w", ready)
            elif isinstance(step, Cancel):
                if step.read in cancelled:
                    continue
                cancelled.add(step.read)
                await write(streams, encode_prefix(Kind.CANCEL, id=step.read), sizes)
            else:
                request = ReadRequest(1, step.offset, step.nbytes, step.region)
                await write(streams, encode_read(len(asked), request), sizes)
                asked.append(step)
        node.transport.advance("w", len(REGION))
        if last is not None:
            await write(streams, last, pieces)
            with suppress(OSError):
                streams[1].write_eof()
        answers = Answers(asked, cancelled)
        try:
            while last is not None or not answers.complete:
                answers.take(*await next_frame(streams[0]))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            assert last is not None
        await leave(streams)
        await node.transport.unregister("w")
        assert node.lost.empty(), "whoever dials in and hangs up is no peer that was lost"


@dataclass
class Answers:
    """What a peer has got for what it asked."""

    asked: list[Ask]
    cancelled: set[int]
    got: dict[int, bytes] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return all(
            index in self.refused or len(self.got.get(index, b"")) == ask.nbytes
            for index, ask in enumerate(self.asked)
        )

    def take(self, prefix: Prefix, body: bytes) -> None:
        ask = self.asked[prefix.id]
        assert prefix.id not in self.refused
        if prefix.kind is Kind.FAULT:
            self.refused.add(prefix.id)
            if ask.allowed:
                assert (prefix.id in self.cancelled, parse_fault(body)[0]) == (True, CANCELLED)
            else:
                assert parse_fault(body)[0] in (RegionUnknown.code, CANCELLED)
        else:
            assert prefix.kind is Kind.DATA
            assert ask.allowed
            got = self.got[prefix.id] = self.got.get(prefix.id, b"") + body
            assert REGION[ask.offset : ask.offset + ask.nbytes].startswith(got)


# --- the asking end -------------------------------------------------------------------------

SIZES = (1, 50, 700, 1500)
"""The sizes of the reads that are under way."""
GUARD = 100


@dataclass(frozen=True)
class Data:
    read: int
    nbytes: int


@dataclass(frozen=True)
class Fault:
    read: int
    code: str


@dataclass(frozen=True)
class GiveUp:
    """The reader does not want it any more."""

    read: int


reads = st.sampled_from([*range(len(SIZES)), *range(len(SIZES)), 77])
answers = st.lists(
    st.tuples(
        st.one_of(
            st.builds(Data, reads, st.integers(1, 400)),
            st.builds(Data, reads, st.integers(1, 400)),
            st.builds(Data, reads, st.integers(1, 2000)),
            st.builds(Fault, reads, st.sampled_from([RegionUnknown.code, CANCELLED, "", "?"])),
            st.builds(GiveUp, reads),
        ),
        cuts,
    ),
    max_size=20,
)


@given(answers, st.one_of(st.none(), garbage), cuts)
def test_the_asking_end(
    steps: list[tuple[Data | Fault | GiveUp, list[int]]], last: bytes | None, pieces: list[int]
) -> None:
    asyncio.run(asking(steps, last, pieces))


class Expected:
    """What becomes of the reads, by the protocol."""

    def __init__(self) -> None:
        self.filled = dict.fromkeys(range(len(SIZES)), 0)
        """Bytes that have come, by read, of the reads that were neither served nor refused yet."""
        self.served: set[int] = set()
        self.refused: dict[int, type[TransportError]] = {}
        self.violated = False

    def take(self, answer: Data | Fault) -> None:
        if self.violated:
            return
        if answer.read not in self.filled:
            self.violated = True
        elif isinstance(answer, Fault):
            del self.filled[answer.read]
            known = answer.code == RegionUnknown.code
            self.refused[answer.read] = RegionUnknown if known else TransportError
        elif self.filled[answer.read] + answer.nbytes > SIZES[answer.read]:
            self.violated = True
        else:
            self.filled[answer.read] += answer.nbytes
            if self.filled[answer.read] == SIZES[answer.read]:
                del self.filled[answer.read]
                self.served.add(answer.read)


async def asking(
    steps: list[tuple[Data | Fault | GiveUp, list[int]]], last: bytes | None, pieces: list[int]
) -> None:
    """A source answers by these steps, says something wrong unless that is None, and closes."""
    node = Node(silence_s=PATIENT_S)
    rooms = [bytearray(b"-" * (size + 2 * GUARD)) for size in SIZES]
    expected = Expected()
    given_up: dict[int, bytes] = {}
    """And what was in the room by then."""
    tasks: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        identities: dict[int, int] = {}
        while len(identities) < len(SIZES):
            prefix, body = await next_frame(reader)
            identities[int(parse_read(body).region)] = prefix.id
        for step, sizes in steps:
            if isinstance(step, GiveUp):
                if step.read in expected.filled:
                    tasks[step.read].cancel()
                    await asyncio.wait([tasks[step.read]])
                continue
            identity = identities.get(step.read, 1 << 20)
            expected.take(step)
            if isinstance(step, Data):
                said = encode_prefix(Kind.DATA, id=identity, payload=step.nbytes)
                said += content(step.read, step.nbytes)
            else:
                said = encode_fault(identity, step.code, "no")
            await write((reader, writer), said, sizes)
        if last is not None:
            await write((reader, writer), last, pieces)
        writer.close()

    async def fill(address: str, read: int) -> None:
        into = memoryview(rooms[read])[GUARD:-GUARD]
        try:
            await node.transport.read(address, str(read), 0, into, priority=1)
        except asyncio.CancelledError:
            given_up[read] = bytes(rooms[read])
            raise

    async with node.transport, impostor(answer) as address, asyncio.timeout(LIMIT_S):
        tasks += [asyncio.create_task(fill(address, read)) for read in range(len(SIZES))]
        await asyncio.wait(tasks)
        _, why = await node.lost.get()
    assert isinstance(why, PeerLost | ProtocolViolation)
    assert isinstance(why, ProtocolViolation) or not expected.violated
    for read, (task, room) in enumerate(zip(tasks, rooms, strict=True)):
        assert set(room[:GUARD] + room[-GUARD:]) == set(b"-")
        assert set(room[GUARD:-GUARD]) <= set(b"-" + content(read, 1))
        if read in given_up:
            assert room == given_up[read]
        elif read in expected.served:
            task.result()
            assert b"-" not in room[GUARD:-GUARD]
        elif read in expected.refused:
            assert type(task.exception()) is expected.refused[read]
        else:
            assert type(task.exception()) is type(why)


def content(read: int, nbytes: int) -> bytes:
    return bytes([ord("a") + read % 26]) * nbytes
