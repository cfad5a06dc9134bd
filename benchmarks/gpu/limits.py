"""What the device can do: how fast it reads its memory, multiplies, and is filled from the host."""

import asyncio
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks import device as loading
from benchmarks.gpu.ours import synchronize
from benchmarks.gpu.scale import scale_of
from services.node.memory.device import CudaLink


def figures(name: str, device: str, runs: int) -> Iterator[tuple[str, float]]:
    """bytes/s and FLOP/s, by name."""
    scale, on = scale_of(name), torch.device(device)
    yield "memory", max(_read(scale.read, on, runs), _copied(scale.read, on, runs))
    yield "product", _product(scale.product, on, runs)
    if on.type == "cuda":
        yield "plain copy", loading.plain(scale.load, runs)
        yield "load", asyncio.run(loading.ours(scale.load, scale.block, runs, CudaLink))


def _read(nbytes: int, device: torch.device, runs: int) -> float:
    values = torch.ones(nbytes // 2, dtype=torch.bfloat16, device=device)
    return nbytes / _fastest(values.sum, runs)


def _copied(nbytes: int, device: torch.device, runs: int) -> float:
    """bytes/s of a copy in device memory: half of them are read, half written."""
    source, target = torch.ones(2, nbytes // 2, dtype=torch.uint8, device=device)
    return nbytes / _fastest(lambda: target.copy_(source), runs)


def _product(size: int, device: torch.device, runs: int) -> float:
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    return 2.0 * size**3 / _fastest(lambda: a @ b, runs)


def _fastest(work: Callable[[], object], runs: int) -> float:
    """Seconds of the fastest run. The first run does not count."""
    times = []
    for _ in range(runs + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])
