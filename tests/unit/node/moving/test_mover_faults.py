"""Sources that break off, stall, lie or send wrong bytes: the mover names them, keeps and shows
only what is right, and another source goes on."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.node.core import pulling
from services.node.core.residency import PlanId
from services.node.moving import mover
from services.node.transport.wire import CANCELLED, Kind, encode_fault, encode_prefix, parse_read
from shared.errors import (
    DigestMismatch,
    LambdaScaleError,
    PeerLost,
    ProtocolViolation,
    RegionUnknown,
    TransportError,
    TransportTimeout,
)
from shared.ids import NodeId
from shared.messages.scaling import Pull
from tests.support.raw_peer import impostor, next_frame
from tests.unit.node.moving.movers import ALL, CHUNK, CONTENT, EVENT, MODEL, Node, Nodes

BAD = NodeId("bad")
GOOD_CHUNKS = 2
"""That a bad source sends before it is bad."""
Answer = Callable[[asyncio.StreamWriter, int, bytes], Awaitable[None]]
"""Sends something for the read of this id, of which these are the right bytes."""


def data(identity: int, payload: bytes) -> bytes:
    return encode_prefix(Kind.DATA, id=identity, payload=len(payload)) + payload


def flipped(payload: bytes) -> bytes:
    """One bit is wrong, in the middle."""
    middle = len(payload) // 2
    return payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]


async def right(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, payload))


async def break_off(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, payload)[: len(payload) // 2])
    writer.close()


async def abort(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, payload)[: len(payload) // 2])
    writer.transport.abort()


async def stall(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, payload)[: len(payload) // 2])
    await asyncio.Event().wait()


async def keep_silent(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    await asyncio.Event().wait()


async def garble(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(payload)


async def send_too_much(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, payload + b"!"))


async def send_for_another(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity + 1000, payload))


async def send_wrong(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, flipped(payload)))


async def send_zeros(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, bytes(len(payload))))


async def refuse(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(encode_fault(identity, "broken", "it hurts"))


async def give_up(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(data(identity, payload[:50]) + encode_fault(identity, CANCELLED, ""))


async def deny(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
    writer.write(encode_fault(identity, RegionUnknown.code, "never heard of it"))


async def serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Callable[[], Answer]
) -> None:
    """Reads of the model's blocks, each answered as `answers()` says."""
    while True:
        prefix, body = await next_frame(reader)
        if prefix.kind is Kind.READ:
            request = parse_read(body)
            content = CONTENT[int(request.region.removeprefix(f"{MODEL}/"))]
            payload = content[request.offset : request.offset + request.nbytes]
            await answers()(writer, prefix.id, payload)


def pull_all(node: Node, source: NodeId, address: str, revision: int) -> None:
    pulls = [Pull(step, block, source) for step, block in enumerate(ALL)]
    node.mover.apply(MODEL, PlanId(EVENT, revision), pulls, {source: address})


FAULTS: dict[Answer, type[LambdaScaleError]] = {
    break_off: PeerLost,
    abort: PeerLost,
    keep_silent: PeerLost,
    stall: TransportTimeout,
    garble: ProtocolViolation,
    send_too_much: ProtocolViolation,
    send_for_another: ProtocolViolation,
    send_wrong: DigestMismatch,
    send_zeros: DigestMismatch,
    refuse: TransportError,
    give_up: TransportError,
    deny: RegionUnknown,
}


@pytest.mark.parametrize(
    ("fault", "error"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS]
)
async def test_a_bad_source(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, fault: Answer, error: type[LambdaScaleError]
) -> None:
    """The blocks it should have sent fail with its name; a good source goes on from what is
    right, and a node behind the first one never sees a wrong byte."""
    monkeypatch.setattr(mover, "REGION_GRACE_S", 0.05)
    good, target, last = [await nodes.start(name) for name in "gtl"]
    good.hold(ALL)
    target.hold([])
    last.hold([])
    asked = 0

    def answers() -> Answer:
        nonlocal asked
        asked += 1
        return right if asked <= GOOD_CHUNKS else fault

    last.pull([target], *((1, block, target) for block in ALL))
    async with impostor(lambda reader, writer: serve(reader, writer, answers)) as address:
        pull_all(target, BAD, address, revision=1)
        await target.until(lambda: len(target.failures) == len(ALL))
        assert {(f.block, f.source) for f in target.failures} == {(b, BAD) for b in ALL}
        assert {type(failure.error) for failure in target.failures} == {error}
        assert not target.arrivals
        target.pull([good], *((1, block, good) for block in ALL), revision=2)
        await target.complete()
    await last.complete()
    assert target.content() == last.content() == CONTENT
    assert {arrival.source for arrival in target.arrivals} == {good.id}
    assert not last.failures


async def test_a_bit_that_flips_on_the_way_is_asked_for_again(nodes: Nodes) -> None:
    """Every chunk, once: the second time all of them are right."""
    target = await nodes.start("t")
    target.hold([])
    seen: set[bytes] = set()

    async def wrong_at_first(writer: asyncio.StreamWriter, identity: int, payload: bytes) -> None:
        writer.write(data(identity, payload if payload in seen else flipped(payload)))
        seen.add(payload)

    async with impostor(lambda reader, writer: serve(reader, writer, lambda: wrong_at_first)) as at:
        pull_all(target, BAD, at, revision=1)
        await target.complete()
    assert target.content() == CONTENT
    assert not target.failures
    assert len(seen) == sum(len(spec.digests) for spec in target.manifest.blocks)


async def test_a_source_that_forgets_the_region_half_way_is_asked_for_the_rest(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come and was shown to others is not written again; what came wrong is read once
    more, by itself."""
    monkeypatch.setattr(pulling, "FIRST_WINDOW", 5)
    target = await nodes.start("t", read_bytes=5 * CHUNK)
    target.hold([])
    asked: list[tuple[int, int]] = []
    written: list[int] = []
    overwrites = target.mover._overwrites

    def watch(buffer: memoryview) -> None:
        written.append(len(buffer) // CHUNK)
        overwrites(buffer)

    target.mover._overwrites = watch

    async def forget(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            prefix, body = await next_frame(reader)
            if prefix.kind is not Kind.READ:
                continue
            request = parse_read(body)
            asked.append((request.offset // CHUNK, request.nbytes // CHUNK))
            content = CONTENT[int(request.region.removeprefix(f"{MODEL}/"))]
            payload = content[request.offset : request.offset + request.nbytes]
            if len(asked) == 1:  # a right chunk, a wrong one, and a part of the next
                sent = payload[:CHUNK] + flipped(payload[CHUNK : 2 * CHUNK]) + payload[2 * CHUNK :]
                writer.write(data(prefix.id, sent[: 2 * CHUNK + 50]))
                writer.write(encode_fault(prefix.id, RegionUnknown.code, "gone for a moment"))
            else:
                writer.write(data(prefix.id, payload))

    async with impostor(forget) as address:
        target.mover.apply(MODEL, PlanId(EVENT, 1), [Pull(0, 0, BAD)], {BAD: address})
        await target.until(lambda: bool(target.arrivals or target.failures))
    assert not target.failures
    assert target.content()[0] == CONTENT[0]
    assert asked == [(0, 5), (2, 3), (1, 1)]
    assert written == [5, 3, 1]
