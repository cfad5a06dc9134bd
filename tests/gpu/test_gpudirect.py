"""RDMA right into a GPU's memory, between two processes.

LS_RDMA_DEVICE=mlx5_0 LS_RDMA_GID_INDEX=3 pytest tests/gpu/test_gpudirect.py
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE

import pytest
import torch

from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from services.node.transport.direct import Place
from services.node.transport.rdma import RdmaDirect
from tests.gpu import NEEDS_GPU
from tests.rdma.guest.peer import DEVICE, GID_INDEX, NBYTES, pattern

pytestmark = [
    NEEDS_GPU,
    pytest.mark.skipif(
        "LS_RDMA_DEVICE" not in os.environ,
        reason="LS_RDMA_DEVICE names no RDMA device: GPUDirect RDMA is not tested",
    ),
]
CUDA = torch.device("cuda:0")
LIMIT_S = 60.0


async def test_reads_land_on_the_device() -> None:
    """Many, one after the other and at a time: what is looked at too early is not all there."""
    arena = Arena(2 * NBYTES)
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.rdma.guest.peer", stdin=PIPE, stdout=PIPE
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        with DeviceArena(arena.memory, CUDA) as on_device:
            landing = on_device.landing
            rdma = RdmaDirect([arena.memory], DEVICE, GID_INDEX, landing=landing)
            async with asyncio.timeout(LIMIT_S), rdma:
                assert on_device.staging == "GPUDirect RDMA, else pinned host arena"
                key, address = (await peer.stdout.readline()).split()
                offer = rdma.offer()
                peer.stdin.write(f"{offer.data.hex()}\n".encode())
                answer = bytes.fromhex((await peer.stdout.readline()).decode())
                reader = await offer.complete(answer)
                part = NBYTES // 16
                into = arena.allocate(NBYTES).memory
                for _ in range(20):
                    into[:] = bytes(NBYTES)
                    on_device.overwrites(into)
                    await asyncio.gather(
                        *(
                            reader.take(Place(int(key), int(address) + at), into[at : at + part])
                            for at in range(0, NBYTES, part)
                        )
                    )
                    landed = on_device.landed(into)
                    assert landed is not None
                    assert landed.cpu().numpy().tobytes() == bytes(into) == pattern()
                reader.close()
    finally:
        peer.stdin.close()
        await peer.wait()
