"""CUDA's driver without a device: device memory is the host's, and processes are one."""

import ctypes
import itertools
import mmap
import os
import threading
from dataclasses import dataclass

from services.node.memory.cuda import EXPORTED_BYTES, CudaError, DmaBuf, Opened

DRIFT = 4096
"""Addresses of another process's memory are not those that it has there itself."""


@dataclass
class Machine:
    """Its devices' drivers, and what they share."""

    peers: bool = True
    """Devices reach each other's memory."""
    shares: bool = True
    """CUDA exports memory to other processes."""
    exports: bool = True
    """And as dma-buf."""

    def __post_init__(self) -> None:
        self.exported: dict[bytes, int] = {}
        self.opened: list[Opened] = []
        """And not closed."""
        self.numbers = itertools.count()
        self.drivers: list[HostDriver] = []


class HostDriver:
    """Implements services.node.memory.cuda.Driver. Copies are done when somebody waits for them,
    and not while `may_copy` is clear; what an adapter has written is there once it is flushed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.drivers.append(self)
        self._begun: list[tuple[int, int, int]] = []
        self._written: list[tuple[int, bytes]] = []
        self.copied: list[tuple[str, int]] = []
        """(where to, bytes) of each copy."""
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.waited = threading.Event()
        """Somebody waits for a copy."""
        self.fails = False
        self.thread: int | None = None

    def write(self, pointer: int, data: bytes) -> None:
        """As an adapter does."""
        self._written.append((pointer, data))

    def export(self, pointer: int) -> bytes:
        self._on_one_thread()
        if not self._machine.shares:
            raise CudaError("cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED")
        handle = next(self._machine.numbers).to_bytes(EXPORTED_BYTES, "big")
        self._machine.exported[handle] = pointer
        return handle

    def open(self, exported: bytes) -> Opened:
        self._on_one_thread()
        if not self._machine.peers:
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        pointer = self._machine.exported[exported]
        self._machine.opened.append(Opened(pointer, pointer - DRIFT))
        return self._machine.opened[-1]

    def close(self, opened: Opened) -> None:
        self._on_one_thread()
        assert not self._begun
        self._machine.opened.remove(opened)

    def dma_buf(self, pointer: int, nbytes: int) -> DmaBuf:
        self._on_one_thread()
        if not self._machine.exports:
            raise CudaError("this device and driver do not export memory as dma-buf")
        return DmaBuf(os.memfd_create("dma-buf"), pointer % mmap.PAGESIZE)

    def flush(self) -> None:
        self._on_one_thread()
        for pointer, data in self._written:
            ctypes.memmove(pointer, data, len(data))
        self._written.clear()

    def to_device(self, target: int, source: int, nbytes: int) -> None:
        self._begin("device", target, source, nbytes)

    def to_host(self, target: int, source: int, nbytes: int) -> None:
        self._begin("host", target, source, nbytes)

    def finish(self) -> None:
        self._on_one_thread()
        self.waited.set()
        if not self.may_copy.wait(20):
            raise TimeoutError("the test never let it copy")
        begun, self._begun = self._begun, []
        if self.fails:
            raise CudaError("cuEventSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE")
        for target, source, nbytes in begun:
            ctypes.memmove(target, source, nbytes)

    def _begin(self, to: str, target: int, source: int, nbytes: int) -> None:
        self._on_one_thread()
        self._begun.append((target, source, nbytes))
        self.copied.append((to, nbytes))

    def _on_one_thread(self) -> None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident()
