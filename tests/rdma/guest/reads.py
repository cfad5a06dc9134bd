"""A node's transport at an end of the wire: `serve 10.9.0.1 DEVICE`, or `read 10.9.0.2 DEVICE`.

The reader says what the first read moved by what, and goes on until the peer is lost.
"""

import asyncio
import sys

from services.node.memory.arena import Arena
from services.node.transport.rdma import RdmaDirect
from services.node.transport.tcp import TcpTransport
from shared.errors import PeerLost, TransportError
from tests.rdma.guest.peer import GID_INDEX, NBYTES, pattern
from tests.support.listeners import Hears

SOURCE = "10.9.0.1"
PORT = 7001


async def main(role: str, address: str, device: str) -> None:
    arena = Arena(NBYTES)
    memory = arena.allocate(NBYTES).memory
    lost = asyncio.Event()

    def on_peer_lost(address: str, error: TransportError) -> None:
        assert isinstance(error, PeerLost)
        lost.set()

    async with TcpTransport(
        address,
        PORT,
        link_bytes_per_s=0,
        listener=Hears(lost=on_peer_lost),
        ways=[RdmaDirect([arena.memory], device, GID_INDEX)],
        silence_s=5.0,
    ) as transport:
        if role == "serve":
            memory[:] = pattern()
            transport.register("weights", memory, ready=NBYTES)
            print("serving", flush=True)
            await asyncio.Event().wait()
        source = f"tcp://{SOURCE}:{PORT}"
        while True:  # until the other end has come so far
            try:
                await transport.connect(source)
                break
            except PeerLost:
                await asyncio.sleep(0.1)
        lost.clear()
        result = await transport.read(source, "weights", 0, memory, priority=1)
        assert memory == pattern()
        print(f"read {result.nbytes} bytes by {result.way}", flush=True)
        try:
            while True:
                await transport.read(source, "weights", 0, memory, priority=1)
        except PeerLost as error:
            print(f"lost: {error}", flush=True)
        await lost.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
