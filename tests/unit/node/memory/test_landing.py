"""Bytes that come to the device first; the device is a double, see tests.support.device_memory."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from services.node.memory.arena import Arena
from services.node.memory.device import DeviceArena
from services.node.memory.landing import Landing
from shared.errors import BadInput, TransportError
from tests.support.device_memory import HostDriver, Machine
from tests.support.links import SlowLink

NBYTES = 10_000


@dataclass
class Gpu:
    arena: Arena
    beside: Arena
    on_device: DeviceArena
    driver: HostDriver
    landing: Landing

    def block(self) -> memoryview:
        return self.arena.allocate(NBYTES).memory

    def device(self, block: memoryview) -> bytes:
        """What lies on the device at its place, whatever is known of it."""
        offset = self.on_device._offset(block)
        return self.on_device._bytes[offset : offset + len(block)].numpy().tobytes()

    def pointer(self, block: memoryview) -> int:
        return self.on_device._bytes.data_ptr() + self.on_device._offset(block)


def gpu(machine: Machine) -> Iterator[Gpu]:
    arena, beside, driver = Arena(1 << 17), Arena(1 << 16), HostDriver(machine)
    cpu = torch.device("cpu")
    other = Arena(1 << 16)
    with DeviceArena(
        arena.memory,
        cpu,
        SlowLink(),
        lambda ordinal: driver,
        beside=[other.memory, beside.memory],
    ) as on_device:
        assert on_device.landing is not None
        yield Gpu(arena, beside, on_device, driver, on_device.landing)
        driver.may_copy.set()


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def ours(machine: Machine) -> Iterator[Gpu]:
    yield from gpu(machine)


@pytest.fixture
def theirs(machine: Machine) -> Iterator[Gpu]:
    yield from gpu(machine)


def noise(seed: int) -> bytes:
    return random.Random(seed).randbytes(NBYTES)


async def test_what_an_adapter_wrote_is_on_both_sides(ours: Gpu) -> None:
    """Not before it is flushed: the double keeps it back until then, as a bus may."""
    before, block = ours.block(), ours.block()
    ours.driver.write(ours.pointer(block), noise(1))
    await ours.landing.land(block)
    assert bytes(block) == ours.device(block) == noise(1)
    assert ours.landing.holds(block)
    assert not ours.landing.holds(before)
    landed = ours.on_device.landed(block)
    assert landed is not None
    assert landed.numpy().tobytes() == noise(1)


async def test_bytes_of_a_peers_device_are_on_both_sides(ours: Gpu, theirs: Gpu) -> None:
    ours.block()
    source, block = theirs.block(), ours.block()
    source[:] = noise(2)
    await theirs.on_device.upload(source)
    source[:] = bytes(NBYTES)  # it is not from the host that they come
    opened = await ours.landing.open(theirs.landing.exported())
    await ours.landing.pull(opened.pointer, block)
    assert bytes(block) == ours.device(block) == noise(2)
    assert ours.landing.holds(block)
    assert ours.driver.copied == [("device", NBYTES), ("host", NBYTES)]


async def test_what_comes_to_a_twin_stays_on_the_device(ours: Gpu, theirs: Gpu) -> None:
    theirs.beside.allocate(NBYTES)
    source, into = (gpu.beside.allocate(NBYTES).memory for gpu in (theirs, ours))
    theirs.on_device.twin(source)[:] = torch.frombuffer(bytearray(noise(3)), dtype=torch.uint8)
    opened = await ours.landing.open(theirs.landing.exported())
    await ours.landing.pull(opened.pointer + theirs.landing.place(source), into)
    assert ours.on_device.twin(into).numpy().tobytes() == noise(3)
    assert bytes(into) == bytes(NBYTES)
    assert ours.driver.copied == [("device", NBYTES)]
    assert not ours.landing.holds(into), "nobody has shown it"


async def test_no_adapter_writes_to_a_twin(ours: Gpu) -> None:
    with pytest.raises(BadInput, match="beside the node's arena"):
        await ours.landing.land(ours.beside.allocate(NBYTES).memory)


def test_a_twin_is_found_while_it_is_shown(ours: Gpu) -> None:
    lent, behind = (ours.beside.allocate(NBYTES).memory for _ in range(2))
    assert not ours.landing.holds(lent)
    ours.on_device.show(lent)
    assert ours.landing.holds(lent)
    assert ours.landing.holds(lent[100:200])
    assert not ours.landing.holds(behind)
    ours.on_device.hide(lent)
    assert not ours.landing.holds(lent)


def test_twins_lie_behind_the_arena_one_after_the_other(ours: Gpu) -> None:
    assert ours.landing.start(ours.arena.memory) == 0
    assert ours.landing.start(ours.beside.memory) == (1 << 17) + (1 << 16)
    elsewhere = Arena(1 << 16)
    assert ours.landing.start(elsewhere.memory) is None
    room = elsewhere.allocate(NBYTES).memory
    assert not ours.landing.reaches(room)
    assert not ours.landing.holds(room)
    with pytest.raises(BadInput, match="no place"):
        ours.landing.place(room)


async def test_a_cancelled_pull_ends_when_nothing_is_written_any_more(
    ours: Gpu, theirs: Gpu
) -> None:
    block = ours.block()
    opened = await ours.landing.open(theirs.landing.exported())
    ours.driver.may_copy.clear()
    pull = asyncio.create_task(ours.landing.pull(opened.pointer, block))
    assert await asyncio.to_thread(ours.driver.waited.wait, 10)
    for _ in range(3):
        pull.cancel()
        await asyncio.sleep(0)
    assert not pull.done()
    ours.driver.may_copy.set()
    with pytest.raises(asyncio.CancelledError):
        await pull
    assert not ours.driver._begun


async def test_what_went_wrong_on_its_way_is_not_there(ours: Gpu) -> None:
    block = ours.block()
    ours.driver.fails = True
    with pytest.raises(TransportError, match="CUDA_ERROR_ECC"):
        await ours.landing.land(block)
    assert not ours.landing.holds(block)


async def test_a_peers_memory_is_given_back_after_the_last_copy(
    machine: Machine, ours: Gpu, theirs: Gpu
) -> None:
    opened = await ours.landing.open(theirs.landing.exported())
    again = await ours.landing.open(theirs.landing.exported())
    ours.driver.may_copy.clear()
    pull = asyncio.create_task(ours.landing.pull(opened.pointer, ours.block()))
    assert await asyncio.to_thread(ours.driver.waited.wait, 10)
    ours.landing.give_back(opened)
    assert machine.opened == [opened, again]
    ours.driver.may_copy.set()
    await pull
    ours.landing.give_back(again)
    await ours.landing.land(ours.block())  # its turn comes after
    assert machine.opened == []


async def test_memory_that_is_not_to_be_had(machine: Machine, ours: Gpu, theirs: Gpu) -> None:
    exported = theirs.landing.exported()
    for wrong in (b"", exported[:-1]):
        with pytest.raises(TransportError, match="no device memory"):
            await ours.landing.open(wrong)
    machine.peers = False
    with pytest.raises(TransportError, match="PEER_ACCESS_UNSUPPORTED"):
        await ours.landing.open(exported)
    machine.shares = machine.exports = False
    assert theirs.landing.exported() == b""
    assert theirs.landing.dma_buf() is None
    with pytest.raises(BadInput, match="5 bytes"):
        await ours.landing.land(memoryview(bytearray(5)))
