"""Whatever a source sends, cut however it likes: C and Python make the same of it."""

import asyncio
import itertools
from collections.abc import Sequence
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.node.transport import native
from services.node.transport.wire import PREFIX_BYTES, Kind, encode_fault, encode_prefix
from shared.errors import RegionUnknown
from tests.support.amounts import examples
from tests.support.raw_peer import LIMIT_S, Node, Streams, impostor, next_frame

SIZES = (700, 1, 300)
"""Bytes of the three reads, whose ids are 0, 1 and 2."""
Outcome = bytes | type[BaseException]


def data(identity: int, nbytes: int) -> bytes:
    payload = bytes((identity * 50 + at) % 251 for at in range(nbytes))
    return encode_prefix(Kind.DATA, id=identity, payload=nbytes) + payload


ids = st.integers(0, 3)
frames = st.one_of(
    st.builds(data, ids, st.integers(1, 350)),
    st.builds(data, ids, st.sampled_from(SIZES)),
    st.just(encode_prefix(Kind.HEARTBEAT)),
    st.builds(lambda id: encode_fault(id, RegionUnknown.code, "gone"), ids),
    st.builds(lambda id: encode_prefix(Kind.DATA, id=id), ids),
    st.builds(lambda kind, id: encode_prefix(kind, id=id), st.sampled_from(Kind), ids),
    st.binary(min_size=PREFIX_BYTES, max_size=2 * PREFIX_BYTES),
)


async def outcomes(sent: bytes, cuts: Sequence[int]) -> list[Outcome]:
    """Why the connection ended, and what became of three reads."""

    async def behave(*streams: *Streams) -> None:
        reader, writer = streams
        for _ in SIZES:
            await next_frame(reader)
        for start, end in itertools.pairwise([0, *sorted(cuts), len(sent)]):
            writer.write(sent[start:end])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    node = Node()
    rooms = [bytearray(size + 2) for size in SIZES]
    async with node.transport, asyncio.timeout(LIMIT_S), impostor(behave) as address:
        reads = (
            node.transport.read(address, "w", 0, memoryview(room)[1:-1], priority=1)
            for room in rooms
        )
        ended = await asyncio.gather(*reads, return_exceptions=True)
        _, lost = await node.lost.get()
    assert not any(room[0] or room[-1] for room in rooms)
    results: list[Outcome] = [type(lost)]
    for room, end in zip(rooms, ended, strict=True):
        results.append(type(end) if isinstance(end, BaseException) else bytes(room[1:-1]))
    return results


@settings(max_examples=examples(40), deadline=None)
@given(sent=st.lists(frames, max_size=8).map(b"".join), cuts=st.lists(st.integers(0, 900)))
@example(sent=data(0, 700) + data(1, 1) + data(2, 300), cuts=[719, 720, 721, 741])
@example(sent=data(0, 350) + data(2, 300) + data(0, 351), cuts=[])
@example(sent=data(0, 350) + encode_prefix(Kind.HEARTBEAT) * 3 + data(0, 350), cuts=[371, 400])
def test_any_stream(sent: bytes, cuts: list[int]) -> None:
    cuts = [cut for cut in cuts if cut < len(sent)]
    assert native.load() is not None
    in_c = asyncio.run(outcomes(sent, cuts))
    with patch.object(native, "load", lambda: None):
        in_python = asyncio.run(outcomes(sent, cuts))
    assert in_c == in_python
