"""A node with a GPU that others read from, in its own process: `python -m tests.gpu.peer cuda:0`.

It prints where its transport is reached, and ends with its input. The bytes of its region `w` are
`pattern()` on the device; on the host they are zeros, so that nobody can have them from there.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from services.node.transport.base import NoListener
from services.node.transport.cuda_ipc import CudaIpcDirect
from services.node.transport.shm import ShmDirect
from services.node.transport.tcp import TcpTransport

MIB = 1 << 20
NBYTES = 24 * MIB
ROOM = 64 * MIB
HERE = "here"


def pattern() -> bytes:
    return random.Random(7).randbytes(NBYTES)


@asynccontextmanager
async def node(arena: Arena, device: DeviceArena) -> AsyncIterator[TcpTransport]:
    """`device` is entered."""
    assert device.landing is not None, "CUDA's driver is not to be had"
    exported = device.landing.exported()
    assert exported, "CUDA does not share memory between processes here"
    async with TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=0,
        ways=[
            CudaIpcDirect([arena.memory], device.landing, exported, machine=HERE),
            ShmDirect([arena.memory], machine=HERE),
        ],
        listener=NoListener(),
    ) as transport:
        yield transport


async def main(device: str) -> None:
    arena = Arena(ROOM)
    arena.allocate(MIB)
    block = arena.allocate(NBYTES).memory
    block[:] = pattern()
    async with AsyncExitStack() as stack:
        on_device = stack.enter_context(DeviceArena(arena.memory, torch.device(device)))
        await on_device.upload(block)
        block[:] = bytes(NBYTES)
        transport = await stack.enter_async_context(node(arena, on_device))
        transport.register("w", block, ready=NBYTES)
        print(transport.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
