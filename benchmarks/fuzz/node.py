"""A real node's data plane: bytes before the handshake, and frames after it, as somebody says them
who knows the cluster's secret and has a capability."""

import asyncio
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.fuzz import parsers
from benchmarks.fuzz.report import Report
from benchmarks.fuzz.values import Source
from services.local.credentials import NODES, NODES_SECRET, SIGNING_KEY
from services.node.transport import wire
from services.node.transport.direct import Place
from services.node.transport.secret import DIALLER, NONCE_BYTES, Secret, load
from shared.capabilities import load_signer
from shared.ids import ModelId, NodeId
from shared.permissions import Role

AT_A_TIME = 16
WITHIN_S = 60.0
FRAMES = 6
READER = NodeId("node-0")


class Node:
    def __init__(
        self, address: str, credentials: Path, model: ModelId, seed: int, report: Report
    ) -> None:
        """`credentials`: of the whole cluster."""
        split = urlsplit(address)
        self._host, self._port = split.hostname, split.port
        self._model = model
        self._report = report
        self._source = Source(f"node {seed}", {"model_id": [model], "tokens": [[1, 2]]})
        secret = load(str(credentials / NODES / READER / NODES_SECRET))
        signer = load_signer(Role.PLANNER, str(credentials / Role.PLANNER / SIGNING_KEY))
        assert secret is not None
        assert signer is not None
        self._secret: Secret = secret
        self._capability = signer.sign(READER, model, range(64), 2**62)

    async def run(self, inputs: int) -> None:
        turn = iter(range(max(1, inputs // FRAMES)))

        async def work() -> None:
            for _ in turn:
                await self._converse()

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(work())

    async def _converse(self) -> None:
        said: list[bytes] = []
        part = "data plane"
        try:
            async with asyncio.timeout(WITHIN_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    part = await self._say(reader, writer, said)
                    writer.write_eof()
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
        except TimeoutError:
            self._report.find(f"{part}: no end within {WITHIN_S:.0f} s", repr(b"".join(said))[:600])
        except (OSError, asyncio.IncompleteReadError):
            pass  # it hung up
        for _ in said:
            self._report.ended(part, "said")

    async def _say(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: list[bytes]
    ) -> str:
        source = self._source
        if source.chance(0.1):
            said.append(source.damaged(wire.encode_hello(wire.Hello(wire.Purpose.READS, 7, "x"))))
            writer.write(said[-1])
            return "data plane, before the handshake"
        reads = source.chance(0.6)
        await self._shake_hands(reader, writer, reads)
        if reads:
            writer.write(wire.encode_permit(self._capability))
        for _ in range(FRAMES):
            said.append(self._read_frame() if reads else self._message())
            writer.write(said[-1])
            await writer.drain()
        return "data plane, reads" if reads else "data plane, messages"

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reads: bool
    ) -> None:
        challenge = (await reader.readexactly(wire.PREFIX_BYTES + NONCE_BYTES))[wire.PREFIX_BYTES :]
        source = self._source
        purpose = wire.Purpose.READS if reads else wire.Purpose.MESSAGES
        way = {"shm": source.random.randbytes(20)} if source.chance(0.2) else {}
        address = "tcp://127.0.0.1:1" if source.chance(0.9) else source.text()
        own = wire.Hello(purpose, 7, address, way, nonce=bytes(NONCE_BYTES))
        proof = self._secret.proof(DIALLER, challenge, wire.unproved(own))
        hello = wire.Hello(purpose, 7, address, way, own.nonce, proof)
        writer.write(wire.encode_hello(hello))
        prefix = wire.parse_prefix(await reader.readexactly(wire.PREFIX_BYTES), max_payload=1 << 30)
        await reader.readexactly(prefix.body)

    def _read_frame(self) -> bytes:
        source = self._source
        identity = source.random.randrange(4)
        region = f"{self._model}/{source.random.randrange(4)}"
        match source.random.randrange(8):
            case 0 | 1 | 2:
                sizes = (1, 64, 4096, 1 << 20, 1 << 40)
                offset, nbytes = (
                    source.random.choice((0, 0, 1, 64, 1 << 62)),
                    (source.random.choice(sizes)),
                )
                name = region if source.chance(0.9) else source.text()
                request = wire.ReadRequest(
                    source.random.choice((0, 1, -(2**31))), offset, nbytes, name, source.chance(0.2)
                )
                frame = wire.encode_read(identity, request)
            case 3:
                frame = wire.encode_prefix(wire.Kind.CANCEL, id=identity)
            case 4:
                frame = wire.encode_prefix(wire.Kind.TAKEN, id=identity)
            case 5:
                frame = wire.encode_permit(
                    self._capability if source.chance(0.5) else source.random.randbytes(100)
                )
            case 6:
                frame = wire.encode_grant(identity, Place(1, 2), 3)
            case _:
                frame = wire.encode_prefix(wire.Kind.HEARTBEAT)
        return source.damaged(frame) if source.chance(0.1) else frame

    def _message(self) -> bytes:
        drawn = parsers.stage_message(self._source)
        after = 4 + int.from_bytes(drawn[:4])
        header, payload = drawn[4:after], drawn[after:]
        prefix = wire.encode_prefix(wire.Kind.MESSAGE, body=len(header), payload=len(payload))
        frame = prefix + header + payload
        return self._source.damaged(frame) if self._source.chance(0.05) else frame
