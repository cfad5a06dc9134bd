"""From the GPU of another process."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
import torch

from services.node.memory.arena import Arena
from services.node.memory.checksum import checksum
from services.node.memory.device import DeviceArena
from shared.errors import PeerLost
from tests.gpu import NEEDS_GPU
from tests.gpu.peer import NBYTES, ROOM, node, pattern

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")
LIMIT_S = 60.0
SECOND: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": "1"}


@asynccontextmanager
async def peer(device: str, environment: Mapping[str, str]) -> AsyncIterator[tuple[Process, str]]:
    """The process, and the address of its node."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gpu.peer", device),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, **environment},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = ""
        async with asyncio.timeout(LIMIT_S):
            while not address.startswith("tcp://"):  # before it come the lines of its log
                line = await process.stdout.readline()
                assert line, "the peer ended"
                address = line.decode().strip()
        yield process, address
    finally:
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize(
    ("device", "environment", "devices"),
    [("cuda:0", {}, 1), ("cuda:1", {}, 2), ("cuda:0", SECOND, 2)],
    ids=["the same", "a second one", "one that is not seen"],
)
async def test_blocks_come_from_device_to_device(
    device: str, environment: Mapping[str, str], devices: int
) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip("there is no second CUDA device to read from")
    arena, beside = Arena(ROOM), Arena(ROOM)
    with DeviceArena(arena.memory, CUDA, beside=[beside.memory]) as on_device:
        async with (
            peer(device, environment) as (_, address),
            node(arena, beside, on_device) as reader,
        ):
            for _ in range(2):
                into = arena.allocate(NBYTES).memory
                async with asyncio.timeout(LIMIT_S):
                    result = await reader.read(address, "w", 0, into, priority=1)
                assert result.way == "cuda-ipc"
                landed = on_device.landed(into)
                assert landed is not None
                assert landed.cpu().numpy().tobytes() == bytes(into) == pattern()
            into = beside.allocate(NBYTES).memory
            async with asyncio.timeout(LIMIT_S):
                result = await reader.read(address, "kv", 0, into, priority=1)
            assert result.way == reader.way_to(address) == "cuda-ipc"
            twin = on_device.twin(into)
            assert twin.cpu().numpy().tobytes() == pattern()
            assert checksum(twin) == checksum(twin.cpu())
            assert not any(into), "it came to the host, too"


async def test_a_peer_that_dies_takes_nothing_with_it() -> None:
    """Its memory goes while it is read from; this process's device works on."""
    arena, beside = Arena(ROOM), Arena(ROOM)
    with DeviceArena(arena.memory, CUDA, beside=[beside.memory]) as on_device:
        async with (
            peer("cuda:0", {}) as (process, address),
            node(arena, beside, on_device) as reader,
        ):
            into = arena.allocate(NBYTES).memory
            await reader.read(address, "w", 0, into, priority=1)
            reads = [
                asyncio.create_task(reader.read(address, "w", 0, into, priority=1))
                for _ in range(50)
            ]
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                ends = await asyncio.gather(*reads, return_exceptions=True)
            assert isinstance(ends[-1], PeerLost)
        there = await on_device.upload(into)
        assert there.cpu().numpy().tobytes() == bytes(into)
        assert int(torch.ones(8, device=CUDA).sum()) == 8
