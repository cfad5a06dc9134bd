"""The device's arena on a GPU: page-locked host memory, copies on a stream of their own."""

import random
from collections.abc import Callable

import pytest
import torch

from services.node.memory import device
from services.node.memory.arena import Arena
from services.node.memory.device import CudaLink, DeviceArena, Link
from shared.errors import CapacityExceeded
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")
MIB = 1 << 20


class Unlockable(CudaLink):
    """What is locked already cannot be locked again: a real failure of CUDA's."""

    def lock(self, memory: memoryview) -> None:
        super().lock(memory)
        try:
            super().lock(memory)
        finally:
            self.unlock(memory)


@pytest.mark.parametrize(
    ("link", "staging"),
    [(CudaLink, "pinned host arena"), (Unlockable, "pinned host buffers")],
)
async def test_blocks_come_as_they_are(
    link: Callable[[torch.device], Link], staging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "BUFFER", MIB)
    arena = Arena(64 * MIB)
    blocks = [arena.allocate(nbytes).memory for nbytes in (9 * MIB + 256, 256, 20 * MIB)]
    for seed, block in enumerate(blocks):
        block[:] = random.Random(seed).randbytes(len(block))
    with DeviceArena(arena.memory, CUDA, link) as on_device:
        assert on_device.staging == staging
        for block in blocks:
            there = await on_device.upload(block)
            assert there.device == CUDA
            assert there.cpu().numpy().tobytes() == bytes(block)
        # A failed lock is not the next kernel's error.
        assert int(torch.ones(8, device=CUDA).sum()) == 8


async def test_the_page_lock_is_given_back() -> None:
    arena = Arena(4 * MIB)
    for _ in range(2):  # locking what is locked fails
        with DeviceArena(arena.memory, CUDA) as on_device:
            assert on_device.staging == "pinned host arena"


async def test_kernels_run_while_a_block_is_on_its_way() -> None:
    """A copy that waits for the compute stream would end after what was queued there before."""
    arena = Arena(64 * MIB)
    block = arena.allocate(64 * MIB).memory
    with DeviceArena(arena.memory, CUDA) as on_device:
        await on_device.upload(block)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: seconds
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record()
        await on_device.upload(block)
        assert not computed.query()  # type: ignore[no-untyped-call]
        computed.synchronize()


def test_a_device_without_room() -> None:
    arena = Arena(1024 * MIB)
    free, _ = torch.cuda.mem_get_info(CUDA)
    taken = torch.empty(free - 512 * MIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(CapacityExceeded, match=r"cuda:0 has no room.*node\.arena_bytes"):
        DeviceArena(arena.memory, CUDA).__enter__()
    del taken
    torch.cuda.empty_cache()
    with DeviceArena(arena.memory, CUDA):
        pass
