import asyncio
import random
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.node.memory import device
from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from shared.errors import BadInput, CapacityExceeded, Conflict
from tests.support.device_memory import HostDriver, Machine
from tests.support.links import SlowLink

CPU = torch.device("cpu")


def filled(arena: Arena, nbytes: int, seed: int) -> memoryview:
    block = arena.allocate(nbytes).memory
    block[:] = random.Random(seed).randbytes(nbytes)
    return block


@pytest.mark.parametrize("may_lock", [True, False])
async def test_blocks_lie_where_they_landed(
    may_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "BUFFER", 1 << 14)
    arena, link = Arena(1 << 20), SlowLink(may_lock=may_lock)
    blocks = [filled(arena, nbytes, nbytes) for nbytes in (70_000, 1, 1 << 14, 5 << 14)]
    with DeviceArena(arena.memory, CPU, link) as on_device:
        uploaded = [await on_device.upload(block) for block in blocks]
        for block, there in zip(blocks, uploaded, strict=True):
            assert bytes(there.numpy()) == bytes(block)
        block = filled(arena, 1000, 7)
        assert (await on_device.upload(block)).numpy().tobytes() == bytes(block)
        assert bytes(uploaded[-1].numpy()) == bytes(blocks[-1])
        offsets = [there.storage_offset() for there in uploaded]
        assert offsets == [0, 18 << 12, 19 << 12, 23 << 12]


async def test_a_locked_arena_is_copied_from_in_place() -> None:
    arena, link = Arena(1 << 20), SlowLink()
    with DeviceArena(arena.memory, CPU, link) as on_device:
        assert link.locked == [arena.memory.view]
        assert on_device.staging == "pinned host arena"
        await on_device.upload(filled(arena, 300_000, 1))
    assert link.copies.done == [300_000]
    assert not link.locked
    assert not link.buffers


async def test_buffers_are_filled_while_others_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "BUFFER", 1000)
    arena, link = Arena(1 << 16), SlowLink(may_lock=False)
    block = filled(arena, 9500, 3)
    with capture_logs() as logs, DeviceArena(arena.memory, CPU, link) as on_device:
        assert on_device.staging == "pinned host buffers"
        there = await on_device.upload(block)
    assert there.numpy().tobytes() == bytes(block)
    assert link.copies.done == [1000] * 9 + [500]
    assert link.copies.most_pending == len(link.buffers) == 2
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["why"] == "no more than 64 KiB may be locked"


def test_a_device_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(1 << 16)

    def no_room(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. 3 GiB are free.\nMore text")

    monkeypatch.setattr(torch, "empty", no_room)
    on_device = DeviceArena(arena.memory, CPU, SlowLink())
    with pytest.raises(CapacityExceeded, match=r"65536 bytes.*3 GiB are free.*node\.arena_bytes"):
        on_device.__enter__()


def test_what_has_no_room_beside_the_arena_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, beside = Arena(1 << 16), Arena(1 << 17)
    empty = torch.empty

    def small(nbytes: int, **more: Any) -> torch.Tensor:
        if nbytes > 1 << 16:
            raise RuntimeError("CUDA out of memory")
        return empty(nbytes, **more)

    monkeypatch.setattr(torch, "empty", small)
    driver = HostDriver(Machine())
    on_device = DeviceArena(
        arena.memory, CPU, SlowLink(), lambda ordinal: driver, beside=[beside.memory]
    )
    with capture_logs() as logs, on_device:
        assert on_device.landing is not None
        assert not on_device.has_twins
        assert on_device.landing.start(beside.memory) is None
    (warning,) = (line for line in logs if line["log_level"] == "warning")
    assert warning["lacks_bytes"] == 1 << 17


async def test_a_block_from_elsewhere_is_refused() -> None:
    arena = Arena(1 << 16)
    on_device = DeviceArena(arena.memory, CPU, SlowLink())
    with on_device, pytest.raises(BadInput, match="10 bytes"):
        await on_device.upload(memoryview(bytearray(10)))
    with pytest.raises(Conflict, match="given back"):
        await on_device.upload(filled(arena, 10, 1))


async def test_an_arena_is_given_back_when_nothing_is_copied() -> None:
    arena, link = Arena(1 << 16), SlowLink()
    on_device = DeviceArena(arena.memory, CPU, link)
    on_device.__enter__()
    link.copies.shut()
    upload = asyncio.create_task(on_device.upload(filled(arena, 10, 1)))
    assert await asyncio.to_thread(link.copies.waited.wait, 10)
    leaving = asyncio.create_task(asyncio.to_thread(on_device.__exit__))
    await asyncio.sleep(0)
    assert link.locked
    link.copies.open()
    await leaving
    await upload
    assert not link.locked


async def test_what_was_written_over_is_not_on_the_device() -> None:
    arena = Arena(1 << 16)
    block, other = filled(arena, 1000, 1), filled(arena, 1000, 2)
    with DeviceArena(arena.memory, CPU, SlowLink()) as on_device:
        assert on_device.landed(block) is None
        await on_device.upload(block)
        landed = on_device.landed(block)
        assert landed is not None
        assert landed.numpy().tobytes() == bytes(block)
        assert on_device.landed(other) is None
        on_device.overwrites(block[999:])
        assert on_device.landed(block) is None
        assert on_device.landed(block[:999]) is not None


@pytest.mark.parametrize("may_lock", [True, False])
async def test_bytes_come_right_to_the_device_where_the_way_down_is_locked(may_lock: bool) -> None:
    arena, driver = Arena(1 << 16), HostDriver(Machine())
    link = SlowLink(may_lock=may_lock)
    with DeviceArena(arena.memory, CPU, link, lambda ordinal: driver) as on_device:
        if not may_lock:
            assert on_device.landing is None
            assert on_device.staging == "pinned host buffers"
            return
        assert on_device.landing is not None
        assert on_device.staging == "pinned host arena"
        on_device.landing.ways += ["CUDA IPC", "GPUDirect RDMA"]
        assert on_device.staging == "CUDA IPC, GPUDirect RDMA, else pinned host arena"


def test_a_device_without_a_driver_is_fed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.node.memory.cuda._LIBRARY", "libnone.so.1")
    with (
        capture_logs() as logs,
        DeviceArena(Arena(1 << 16).memory, CPU, SlowLink()) as on_device,
    ):
        assert on_device.landing is None
    assert any("libnone" in line.get("why", "") for line in logs)
