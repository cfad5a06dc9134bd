"""Bytes that come to a GPU first, within one process."""

import os
import random
from collections.abc import Iterator

import pytest
import torch

from services.node.memory.arena import Arena
from services.node.memory.cuda import EXPORTED_BYTES, CudaDriver, CudaError
from services.node.memory.device import DeviceArena
from services.node.memory.landing import Landing
from shared.errors import TransportError
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda:0")
MIB = 1 << 20
NBYTES = 9 * MIB + 256


@pytest.fixture
def arena() -> Arena:
    return Arena(64 * MIB)


@pytest.fixture
def device(arena: Arena) -> Iterator[DeviceArena]:
    with DeviceArena(arena.memory, CUDA) as device:
        yield device


@pytest.fixture
def landing(device: DeviceArena) -> Landing:
    assert device.landing is not None
    return device.landing


@pytest.fixture
def block(arena: Arena) -> memoryview:
    arena.allocate(3 * MIB)
    return arena.allocate(NBYTES).memory


def noise(device: torch.device) -> torch.Tensor:
    data = random.Random(int(device.index)).randbytes(NBYTES)
    there = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    torch.cuda.synchronize(device)
    return there


def the_same(device: DeviceArena, block: memoryview, expected: torch.Tensor) -> bool:
    """On both sides."""
    landed = device.landed(block)
    assert landed is not None
    data = expected.cpu().numpy().tobytes()
    return landed.device == CUDA and landed.cpu().numpy().tobytes() == bytes(block) == data


@pytest.mark.parametrize("index", [0, 1])
async def test_from_a_device(
    device: DeviceArena, landing: Landing, block: memoryview, index: int
) -> None:
    if index >= torch.cuda.device_count():
        pytest.skip("there is no second CUDA device to copy from")
    source = noise(torch.device("cuda", index))
    if index:  # as `open` does for another process's
        torch.zeros(1, device=CUDA).copy_(source[:1])
    await landing.pull(source.data_ptr(), block)
    assert the_same(device, block, source)


async def test_what_was_written_to_the_device_comes_down(
    device: DeviceArena, landing: Landing, block: memoryview
) -> None:
    """A kernel writes here; in test_gpudirect an adapter does."""
    data = noise(CUDA)
    offset = device._offset(block)
    device._bytes[offset : offset + NBYTES].copy_(data)
    torch.cuda.synchronize(CUDA)
    await landing.land(block)
    assert the_same(device, block, data)


async def test_kernels_run_meanwhile(
    device: DeviceArena, landing: Landing, block: memoryview
) -> None:
    source = noise(CUDA)
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: seconds
    computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
    computed.record()
    await landing.pull(source.data_ptr(), block)
    assert not computed.query()  # type: ignore[no-untyped-call]
    computed.synchronize()
    assert the_same(device, block, source)


async def test_this_process_is_not_another(landing: Landing) -> None:
    exported = landing.exported()
    assert len(exported) == EXPORTED_BYTES
    with pytest.raises(TransportError, match="cuIpcOpenMemHandle"):
        await landing.open(exported)


def test_device_memory_as_a_dma_buf(landing: Landing) -> None:
    memory = landing.dma_buf()
    if memory is None:
        pytest.skip("this device and driver do not export memory as dma-buf")
    try:
        assert "dmabuf" in os.readlink(f"/proc/self/fd/{memory.descriptor}")
        assert 0 <= memory.offset < os.sysconf("SC_PAGESIZE")
    finally:
        os.close(memory.descriptor)


def test_what_fails_says_what_and_why() -> None:
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(4096)
