"""A node with a GPU that others read from, in its own process: `python -m tests.gpu.peer cuda:0`.

It prints where its transport is reached, and ends with its input. The bytes of its regions `w`, in
the arena, and `kv`, beside it, are `pattern()` on the device; on the host they are zeros, so that
nobody can have them from there.
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
async def node(arena: Arena, beside: Arena, device: DeviceArena) -> AsyncIterator[TcpTransport]:
    """`device` is entered, and has a twin of `beside`."""
    memories = [arena.memory, beside.memory]
    assert device.landing is not None, "CUDA's driver is not to be had"
    exported = device.landing.exported()
    assert exported, "CUDA does not share memory between processes here"
    async with TcpTransport(
        "127.0.0.1",
        0,
        link_bytes_per_s=0,
        ways=[
            CudaIpcDirect(memories, device.landing, exported, machine=HERE),
            ShmDirect(memories, machine=HERE),
        ],
        listener=NoListener(),
    ) as transport:
        yield transport


async def main(device: str) -> None:
    arena, beside = Arena(ROOM), Arena(ROOM)
    arena.allocate(MIB)
    block, kv = arena.allocate(NBYTES).memory, beside.allocate(NBYTES).memory
    block[:] = pattern()
    async with AsyncExitStack() as stack:
        on_device = stack.enter_context(
            DeviceArena(arena.memory, torch.device(device), beside=[beside.memory])
        )
        there = await on_device.upload(block)
        on_device.twin(kv).copy_(there)
        torch.cuda.synchronize(there.device)
        block[:] = bytes(NBYTES)
        transport = await stack.enter_async_context(node(arena, beside, on_device))
        transport.register("w", block, ready=NBYTES)
        on_device.show(kv)
        transport.register("kv", kv, ready=NBYTES)
        print(transport.address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
