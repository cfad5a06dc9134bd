"""The rate at which all threads together read memory: the roofline of a decode step."""

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from services.node.engine.huge_pages import HugePages

READ_BYTES = 1 << 30
"""More than the caches of most processors hold."""
PIECE = 32 << 20
"""Bytes that a thread reads at a time."""


class Memory:
    """Read by memory.c if there is a compiler, else by torch's sum, which is slower. It lies in
    huge pages if it can, as packed weights do."""

    def __init__(self) -> None:
        self._values = HugePages(READ_BYTES).take(READ_BYTES >> 12, 1 << 10, torch.float32)
        self._values.fill_(1)
        self._ways: list[Callable[[], object]] = [self._values.sum]
        self._rates: list[float] = []
        if compiler := shutil.which("cc"):
            self._ways.append(self._reader(compiler))

    def measure(self) -> float:
        """bytes/s, the best of three."""
        best = 0.0
        for way in self._ways * 3:
            began = time.perf_counter()
            way()
            best = max(best, READ_BYTES / (time.perf_counter() - began))
        self._rates.append(best)
        return best

    @property
    def bandwidth(self) -> float:
        return median(self._rates)

    def _reader(self, compiler: str) -> Callable[[], object]:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "memory.so"
            source = Path(__file__).with_name("memory.c")
            flags = ["-O3", "-march=native", "-shared", "-fPIC"]
            subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
            read = ctypes.CDLL(str(library)).read_all
        read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_uint64
        first = self._values.data_ptr()
        pieces = range(first, first + READ_BYTES, PIECE)
        pool = ThreadPoolExecutor(torch.get_num_threads())
        return lambda: list(pool.map(lambda at: read(at, PIECE), pieces))
