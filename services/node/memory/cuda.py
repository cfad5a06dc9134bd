"""What torch does not offer of CUDA's driver: memory that other devices and processes can reach.

CUDA Driver API, "Memory Management" (cuMemGetHandleForAddressRange), "Device Management" (GPUDirect
RDMA attributes, cuFlushGPUDirectRDMAWrites) and "Unified Addressing" (cuIpc*).
"""

import ctypes
import mmap
import struct
from dataclasses import dataclass
from typing import Protocol

_LIBRARY = "libcuda.so.1"
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_DEVICE_FLUSH_WRITES_OPTIONS = 117
_DEVICE_WRITES_ORDERING = 118
_DEVICE_DMA_BUF_SUPPORTED = 124
_FLUSH_FROM_HOST = 1
_ORDERED_FOR_OWNER = 100
_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER = 0, 100
_HANDLE_DMA_BUF_FD = 1
_LAZY_ENABLE_PEER_ACCESS = 1
_EXPORTED = struct.Struct("!64sQ")
EXPORTED_BYTES = _EXPORTED.size


class CudaError(Exception):
    """A call failed, or the driver or device does not support it."""


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """Device memory in the form that other drivers of the kernel accept."""

    descriptor: int
    """The holder has to close it."""
    offset: int
    """Where the memory begins in the buffer."""


@dataclass(frozen=True, slots=True)
class Opened:
    """Device memory of another process."""

    pointer: int
    """The address of its first byte."""
    allocation: int
    """The address of the allocation that it is a part of."""


class Driver(Protocol):
    """One device's driver, made and used on one thread. Every failure raises CudaError."""

    def export(self, pointer: int) -> bytes:
        """Returns EXPORTED_BYTES bytes with which another process can `open` the device memory."""

    def open(self, exported: bytes) -> Opened:
        """Makes another process's device memory readable by this device. Fails for memory of this
        process."""

    def close(self, opened: Opened) -> None: ...

    def dma_buf(self, pointer: int, nbytes: int) -> DmaBuf: ...

    def flush(self) -> None:
        """After this, copies see everything that other devices have written to this device's
        memory."""

    def to_device(self, target: int, source: int, nbytes: int) -> None:
        """Begins a copy from device to device. Copies are done in the order of the calls."""

    def to_host(self, target: int, source: int, nbytes: int) -> None:
        """Begins a copy to page-locked memory."""

    def finish(self) -> None:
        """Waits, asleep, until all copies that were begun are done."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class CudaDriver:
    """Calls the driver by ctypes, which releases the GIL during a call."""

    def __init__(self, ordinal: int) -> None:
        """`ordinal`: the device's number among those that this process sees."""
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(str(error)) from error
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._stream, self._done = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(ordinal))
        self._device = number
        # The context that torch uses, too.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)
        self._call(
            "cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_STREAM_NON_BLOCKING)
        )
        flags = ctypes.c_uint(_EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)
        self._call("cuEventCreate", ctypes.byref(self._done), flags)
        self._ordered = self._attribute(_DEVICE_WRITES_ORDERING) >= _ORDERED_FOR_OWNER

    def export(self, pointer: int) -> bytes:
        handle, base, size = _IpcHandle(), ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(pointer),
        )
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return _EXPORTED.pack(bytes(handle.reserved), pointer - base.value)

    def open(self, exported: bytes) -> Opened:
        handle, offset = _EXPORTED.unpack(exported)
        base = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(base),
            _IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return Opened(base.value + offset, base.value)

    def close(self, opened: Opened) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(opened.allocation))

    def dma_buf(self, pointer: int, nbytes: int) -> DmaBuf:
        if not self._attribute(_DEVICE_DMA_BUF_SUPPORTED):
            raise CudaError("this device and driver do not export memory as dma-buf")
        if not (self._ordered or self._attribute(_DEVICE_FLUSH_WRITES_OPTIONS) & _FLUSH_FROM_HOST):
            raise CudaError("writes of other devices can neither be waited for nor flushed")
        start = pointer // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(pointer + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = ctypes.c_int()
        self._call(
            "cuMemGetHandleForAddressRange",
            ctypes.byref(descriptor),
            ctypes.c_uint64(start),
            ctypes.c_size_t(stop - start),
            ctypes.c_int(_HANDLE_DMA_BUF_FD),
            ctypes.c_uint64(0),
        )
        return DmaBuf(descriptor.value, pointer - start)

    def flush(self) -> None:
        if not self._ordered:
            self._call(
                "cuFlushGPUDirectRDMAWrites",
                ctypes.c_int(_FLUSH_CURRENT_CONTEXT),
                ctypes.c_int(_FLUSH_TO_OWNER),
            )

    def to_device(self, target: int, source: int, nbytes: int) -> None:
        self._call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            self._stream,
        )

    def to_host(self, target: int, source: int, nbytes: int) -> None:
        self._call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            self._stream,
        )

    def finish(self) -> None:
        self._call("cuEventRecord", self._done, self._stream)
        self._call("cuEventSynchronize", self._done)

    def _attribute(self, name: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(name), self._device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise CudaError(f"the driver is too old: it has no {name}") from error
        if status := function(*arguments):
            raise CudaError(f"{name}: {self._describe(status)}")

    def _describe(self, status: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(status, ctypes.byref(text)) or text.value is None:
            return f"error {status}"
        return text.value.decode()
