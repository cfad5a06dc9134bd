"""How fast blocks go from the host's arena to the device's, beside one plain copy of the same bytes
from page-locked memory in the same run. Bar: 0.9 of the plain copy. It also measures how fast parts
of 4 MiB that come from another device are on this device and on the host, where they are checked.

    python -m benchmarks.device [--mib 1024] [--block-mib 128] [--runs 7]

Needs a GPU; without a GPU it says so and exits with 2.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable

import torch

from services.node.memory.arena import Arena
from services.node.memory.device import CudaLink, DeviceArena, Link
from shared.errors import CapacityExceeded

MIB = 1 << 20
BAR = 0.9
PART = 4 * MIB
"""Bytes that a reader takes at a time."""
DEVICE = torch.device("cuda:0")


class BufferedLink(CudaLink):
    """A link on a machine that does not allow page-locking the arena."""

    def lock(self, memory: memoryview) -> None:
        raise CapacityExceeded("left out, to measure the way through buffers")


def plain(nbytes: int, runs: int) -> float:
    """Median bytes/s of one copy of everything."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)

    def copy() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    return rate(nbytes, [copy() for _ in range(runs + 1)])


async def ours(nbytes: int, block: int, runs: int, link: Callable[[torch.device], Link]) -> float:
    """Median bytes/s of blocks that are there at once."""
    arena = Arena(nbytes)
    memory = arena.allocate(nbytes).memory
    blocks = [memory[start : start + block] for start in range(0, nbytes, block)]
    times = []
    with DeviceArena(arena.memory, DEVICE, link) as on_device:
        for _ in range(runs + 1):
            started = time.perf_counter()
            await asyncio.gather(*map(on_device.upload, blocks))
            times.append(time.perf_counter() - started)
    return rate(nbytes, times)


async def down(nbytes: int, runs: int) -> float:
    """Median bytes/s, part after part, as a reader takes them from a peer's device. The peer's
    memory is this device's own."""
    arena = Arena(nbytes)
    memory = arena.allocate(nbytes).memory
    source = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    times = []
    with DeviceArena(arena.memory, DEVICE) as on_device:
        assert on_device.landing is not None
        for _ in range(runs + 1):
            started = time.perf_counter()
            for start in range(0, nbytes, PART):
                part = memory[start : start + PART]
                await on_device.landing.pull(source.data_ptr() + start, part)
            times.append(time.perf_counter() - started)
    return rate(nbytes, times)


def rate(nbytes: int, times: list[float]) -> float:
    """The first run, which makes the device's context, does not count."""
    return nbytes / statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--block-mib", type=int, default=128)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.device needs a CUDA device; torch finds none here", file=sys.stderr)
        return 2
    nbytes, block = arguments.mib * MIB, arguments.block_mib * MIB
    base = plain(nbytes, arguments.runs)
    arena = asyncio.run(ours(nbytes, block, arguments.runs, CudaLink))
    buffers = asyncio.run(ours(nbytes, block, arguments.runs, BufferedLink))
    landed = asyncio.run(down(nbytes, arguments.runs))
    print(f"{torch.cuda.get_device_name(DEVICE)}, {arguments.mib} MiB, {arguments.runs} runs")
    print(f"plain pinned copy     {base / 1e9:7.2f} GB/s")
    print(f"pinned host arena     {arena / 1e9:7.2f} GB/s   {arena / base:.2f} of plain")
    print(f"pinned host buffers   {buffers / 1e9:7.2f} GB/s   {buffers / base:.2f} of plain")
    print(f"device, and down      {landed / 1e9:7.2f} GB/s   {landed / base:.2f} of plain")
    return 0 if arena >= BAR * base else 1


if __name__ == "__main__":
    sys.exit(main())
