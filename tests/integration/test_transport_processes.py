"""A peer in another process that is killed, or stopped, in the middle of a transfer."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.node.transport.tcp import TcpTransport
from shared.errors import PeerLost, TransportError, TransportTimeout
from tests.support.listeners import Hears

SOURCE = """
import asyncio
from services.node.transport.base import NoListener
from services.node.transport.tcp import TcpTransport

async def main() -> None:
    transport = TcpTransport(
        "127.0.0.1", 0, link_bytes_per_s=4_000_000,
        listener=NoListener(),
    )
    async with transport:
        data = memoryview(bytearray(b"x") * (8 << 20))
        transport.register("w", data, ready=len(data))
        transport.register("never", data)
        print(transport.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def source() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SOURCE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
async def test_a_source_that_dies_in_the_middle(number: signal.Signals) -> None:
    lost: asyncio.Queue[tuple[str, TransportError]] = asyncio.Queue()
    transport = TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=0,
        listener=Hears(lost=lambda address, error: lost.put_nowait((address, error))),
    )
    async with source() as (process, address), transport, asyncio.timeout(20):
        await transport.connect(address)
        first = memoryview(bytearray(256 * 1024))
        running = memoryview(bytearray(8 << 20))
        reads = [
            asyncio.ensure_future(transport.read(address, "w", 0, running, priority=2)),
            asyncio.ensure_future(transport.read(address, "never", 0, first, priority=1)),
        ]
        await transport.read(address, "w", 0, first, priority=1)
        process.send_signal(number)
        sent_at = time.monotonic()
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {PeerLost, TransportTimeout}
        told, error = await lost.get()
        assert told == address
        # A killed peer is known at once, a stopped one by its missing heartbeats.
        if number is signal.SIGKILL:
            assert isinstance(error, PeerLost)
            assert "silent" not in str(error)
        else:
            assert time.monotonic() - sent_at > 0.5
        with pytest.raises(PeerLost):
            await transport.connect(address)
    assert lost.empty()
