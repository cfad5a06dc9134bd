"""What a node lets others read: what the capabilities that they show allow, on every way that
carries bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from services.local.certificates import CERTIFICATE, KEY, Authority
from services.node.memory.arena import Arena
from services.node.moving.gate import CapabilityGate
from services.node.moving.mover import permit_for, region_of
from services.node.transport import native, tls
from services.node.transport.base import NoListener
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport
from services.node.transport.tls import Tls
from shared.capabilities import TOLERANCE_S, Signer, Signers
from shared.errors import ReadRefused
from shared.ids import ModelId, NodeId

SECOND = 10**9
NOW_NS = 1_800_000_000 * SECOND
MODEL, OTHER = ModelId("m"), ModelId("other")
PLANNER = Signer("planner", b"p" * 32)
STRANGER = Signer("planner", b"s" * 32)
SIGNERS = Signers({"planner": PLANNER.public_half})
READER = NodeId("reader")
NOBODY = "reader-by-another-name"
"""Its certificate names no node."""
BLOCK = b"weights of one block" * 500
KINDS = ("tcp", "tcp in C", "shm", "tls")


def signed(
    *,
    by: Signer = PLANNER,
    reader: NodeId = READER,
    model: ModelId = MODEL,
    blocks: range = range(4),
    for_s: float = 60.0,
) -> bytes:
    return by.sign(reader, model, blocks, NOW_NS + round(for_s * SECOND))


class Ends:
    """A source with two models of four blocks, and readers."""

    def __init__(self, kind: str, certificates: Callable[[str], Tls]) -> None:
        self.kind = kind
        self.certificates = certificates
        self.open = AsyncExitStack()
        self.now_ns = NOW_NS

    async def node(self, name: str, *, asks: bool = False) -> TcpTransport:
        arena = Arena(1 << 20)
        transport = TcpTransport(
            "127.0.0.1",
            0,
            link_bytes_per_s=0,
            listener=NoListener(),
            ways=[ShmDirect([arena.memory], machine="here", bytes_per_s=0)]
            if self.kind == "shm"
            else [],
            tls=self.certificates(name) if self.kind == "tls" else None,
            gate=CapabilityGate(SIGNERS, clock=lambda: self.now_ns) if asks else None,
            silence_s=60.0,
        )
        await self.open.enter_async_context(transport)
        self.open.callback(arena.close)
        self.arena = arena
        return transport

    async def source(self) -> TcpTransport:
        source = await self.node("source", asks=True)
        for model in (MODEL, OTHER):
            for block in range(4):
                room = self.arena.allocate(len(BLOCK)).memory
                room[:] = BLOCK
                source.register(region_of(model, block), room, ready=len(BLOCK))
        return source

    async def read(
        self,
        reader: TcpTransport,
        source: TcpTransport,
        capability: bytes,
        *,
        model: ModelId = MODEL,
        block: int = 0,
    ) -> bytes:
        into = self.arena.allocate(len(BLOCK))
        async with asyncio.timeout(60):
            await reader.read(
                source.address,
                region_of(model, block),
                0,
                into.memory,
                priority=1,
                permit=permit_for(model, capability),
            )
        return bytes(into.memory)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tls]:
    """Of each node, as `init` makes them."""
    directory = tmp_path_factory.mktemp("authority")
    authority = Authority.of(directory / "authority", "nodes")

    def of_node(name: str) -> Tls:
        own = directory / name
        if not own.exists():
            subject = name if name == NOBODY else f"{tls.OF_NODE}{name}"
            authority.issue(own, subject, [name])
            authority.trust(own)
        files = (own / CERTIFICATE, own / KEY, own / "nodes.pem")
        loaded = tls.load(*map(str, files))
        assert loaded is not None
        return loaded

    return of_node


@pytest.fixture(params=KINDS)
async def ends(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    certificates: Callable[[str], Tls],
) -> AsyncIterator[Ends]:
    if request.param == "tcp":
        monkeypatch.setattr(native, "load", lambda: None)
    elif request.param == "tcp in C":
        assert native.load() is not None
    ends = Ends(request.param, certificates)
    async with ends.open:
        yield ends


async def test_a_reader_gets_what_its_capability_says(ends: Ends) -> None:
    source, reader = await ends.source(), await ends.node("reader")
    for block in range(4):
        assert await ends.read(reader, source, signed(), block=block) == BLOCK
    other = signed(model=OTHER, blocks=range(1))
    assert await ends.read(reader, source, other, model=OTHER) == BLOCK


REFUSED = {
    "none": b"",
    "junk": b"junk",
    "of another signer": signed(by=STRANGER),
    "for another model": signed(model=OTHER),
    "for other blocks": signed(blocks=range(1, 4)),
    "expired": signed(for_s=-TOLERANCE_S - 1),
}


@pytest.mark.parametrize("capability", REFUSED.values(), ids=REFUSED.keys())
async def test_others_are_refused_and_the_connection_goes_on(ends: Ends, capability: bytes) -> None:
    source, reader = await ends.source(), await ends.node("reader")
    with pytest.raises(ReadRefused):
        await ends.read(reader, source, capability)
    assert await ends.read(reader, source, signed()) == BLOCK


async def test_a_capability_that_another_connection_has_shown_counts_on_that_one_only(
    ends: Ends,
) -> None:
    source, reader, second = await ends.source(), await ends.node("reader"), await ends.node("x")
    assert await ends.read(reader, source, signed()) == BLOCK
    with pytest.raises(ReadRefused, match="takes a capability"):
        await ends.read(second, source, b"")


@pytest.mark.parametrize("ends", ["tls"], indirect=True)
async def test_another_node_cannot_use_what_it_has_seen(ends: Ends) -> None:
    """Its certificate says who it is."""
    source, thief = await ends.source(), await ends.node("thief")
    with pytest.raises(ReadRefused, match="for node reader, shown by node thief"):
        await ends.read(thief, source, signed())
    nobody = await ends.node(NOBODY)
    with pytest.raises(ReadRefused, match="whose certificate names no node"):
        await ends.read(nobody, source, signed())


async def test_it_ends_while_the_connection_stands(ends: Ends) -> None:
    source, reader = await ends.source(), await ends.node("reader")
    capability = signed(for_s=10)
    assert await ends.read(reader, source, capability) == BLOCK
    ends.now_ns += round((10 + TOLERANCE_S) * SECOND)
    assert await ends.read(reader, source, capability) == BLOCK  # clocks may differ
    ends.now_ns += SECOND
    with pytest.raises(ReadRefused, match="ended 301 s ago"):
        await ends.read(reader, source, capability)
    assert await ends.read(reader, source, signed(for_s=1000)) == BLOCK


async def test_what_was_refused_is_shown_again(ends: Ends) -> None:
    """The source's clock was wrong, for example."""
    source, reader = await ends.source(), await ends.node("reader")
    ends.now_ns += 10_000 * SECOND
    with pytest.raises(ReadRefused, match="ended"):
        await ends.read(reader, source, signed())
    ends.now_ns = NOW_NS
    assert await ends.read(reader, source, signed()) == BLOCK


async def test_the_signature_is_checked_once_for_each_connection(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bytes] = []
    real = CapabilityGate.claims_of

    def counting(self: CapabilityGate, data: bytes, certified: str | None) -> object:
        checked.append(data)
        return real(self, data, certified)

    monkeypatch.setattr(CapabilityGate, "claims_of", counting)
    source, reader = await ends.source(), await ends.node("reader")
    for _ in range(5):
        await asyncio.gather(*(ends.read(reader, source, signed(), block=b) for b in range(4)))
    assert len(checked) == 1
