"""What is said to CUDA's driver: to functions of the prototypes in cuda.h, over host memory."""

import ctypes
import mmap
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import pytest

from services.node.memory import cuda
from services.node.memory.cuda import EXPORTED_BYTES, CudaDriver, CudaError, Opened

CONTEXT, STREAM, EVENT = 0x7000_0000_0001, 0x7000_0000_0002, 0x7000_0000_0003
"""They do not fit into 32 bits."""
FLUSH_OPTIONS, ORDERING, DMA_BUF = 117, 118, 124
PAGE = mmap.PAGESIZE
Handle = cuda._IpcHandle
assert ctypes.sizeof(Handle) == 64  # CU_IPC_HANDLE_SIZE


class Library:
    """Notes the calls; pointers in it are addresses."""

    def __init__(self) -> None:
        self.attributes = {FLUSH_OPTIONS: 1, ORDERING: 0, DMA_BUF: 1}
        self.allocation = ctypes.create_string_buffer(8 * PAGE)
        self.begun: list[tuple[int, int, int]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        for name, types, act in self._functions():
            setattr(self, name, self._declare(name, types, act))

    @property
    def base(self) -> int:
        return ctypes.addressof(self.allocation)

    def _declare(self, name: str, types: tuple[Any, ...], act: Callable[..., None]) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name not in self.fails:
                act(*arguments)
            return self.fails.get(name, 0)

        return ctypes.CFUNCTYPE(c_int, *types)(call)

    def _functions(self) -> list[tuple[str, tuple[Any, ...], Callable[..., None]]]:
        def store(value: int) -> Callable[..., None]:
            return lambda where, *_: where.__setitem__(0, value)

        def nothing(*_: object) -> None: ...

        def attribute(where: Any, name: int, device: int) -> None:
            assert device == 5
            where[0] = self.attributes[name]

        def address_range(base: Any, size: Any, pointer: int) -> None:
            assert self.base <= pointer < self.base + len(self.allocation)
            base[0], size[0] = self.base, len(self.allocation)

        def handle(where: Any, pointer: int) -> None:
            assert pointer == self.base
            where[0].reserved[:] = bytes(range(64))

        def open_handle(where: Any, handle: Any, flags: int) -> None:
            assert (bytes(handle.reserved), flags) == (bytes(range(64)), 1)
            where[0] = 0x7F00_0000_0000

        def range_handle(where: int, pointer: int, nbytes: int, kind: int, flags: int) -> None:
            assert (kind, flags, pointer % PAGE, nbytes % PAGE) == (1, 0, 0, 0)
            c_int.from_address(where).value = 77

        def copy(target: int, source: int, nbytes: int, stream: int) -> None:
            assert stream == STREAM
            self.begun.append((target, source, nbytes))

        def synchronize(event: int) -> None:
            assert event == EVENT
            for target, source, nbytes in self.begun:
                ctypes.memmove(target, source, nbytes)
            self.begun.clear()

        def name(status: int, where: Any) -> None:
            where[0] = b"CUDA_ERROR_NOT_PERMITTED" if status == 800 else None

        return [
            ("cuInit", (c_uint,), nothing),
            ("cuDeviceGet", (POINTER(c_int), c_int), store(5)),
            ("cuDevicePrimaryCtxRetain", (POINTER(c_void_p), c_int), store(CONTEXT)),
            ("cuCtxSetCurrent", (c_void_p,), nothing),
            ("cuStreamCreate", (POINTER(c_void_p), c_uint), store(STREAM)),
            ("cuEventCreate", (POINTER(c_void_p), c_uint), store(EVENT)),
            ("cuDeviceGetAttribute", (POINTER(c_int), c_int, c_int), attribute),
            (
                "cuMemGetAddressRange_v2",
                (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
                address_range,
            ),
            ("cuIpcGetMemHandle", (POINTER(Handle), c_uint64), handle),
            ("cuIpcOpenMemHandle_v2", (POINTER(c_uint64), Handle, c_uint), open_handle),
            ("cuIpcCloseMemHandle", (c_uint64,), nothing),
            (
                "cuMemGetHandleForAddressRange",
                (c_void_p, c_uint64, c_size_t, c_int, c_uint64),
                range_handle,
            ),
            ("cuFlushGPUDirectRDMAWrites", (c_int, c_int), nothing),
            ("cuMemcpyDtoDAsync_v2", (c_uint64, c_uint64, c_size_t, c_void_p), copy),
            ("cuMemcpyDtoHAsync_v2", (c_void_p, c_uint64, c_size_t, c_void_p), copy),
            ("cuEventRecord", (c_void_p, c_void_p), nothing),
            ("cuEventSynchronize", (c_void_p,), synchronize),
            ("cuGetErrorName", (c_int, POINTER(c_char_p)), name),
        ]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    return library


def test_the_context_that_torch_uses_is_made_current(library: Library) -> None:
    CudaDriver(3)
    assert [call[0] for call in library.calls[:2]] == ["cuInit", "cuDeviceGet"]
    assert library.calls[1][2] == 3
    assert ("cuCtxSetCurrent", CONTEXT) in library.calls


def test_memory_goes_to_another_process_and_back(library: Library) -> None:
    driver = CudaDriver(0)
    exported = driver.export(library.base + 512)
    assert len(exported) == EXPORTED_BYTES
    opened = driver.open(exported)
    assert opened == Opened(0x7F00_0000_0200, 0x7F00_0000_0000)
    driver.close(opened)
    assert library.calls[-1] == ("cuIpcCloseMemHandle", 0x7F00_0000_0000)


def test_copies_are_done_when_they_are_waited_for(library: Library) -> None:
    driver, host = CudaDriver(0), ctypes.create_string_buffer(3000)
    ctypes.memset(library.base, ord("s"), 3000)
    driver.to_device(library.base + 4000, library.base, 3000)
    driver.to_host(ctypes.addressof(host), library.base + 4000, 3000)
    assert host.raw == bytes(3000)
    driver.finish()
    assert host.raw == b"s" * 3000
    assert library.calls[-2] == ("cuEventRecord", EVENT, STREAM)


def test_a_dma_buf_is_of_whole_pages(library: Library) -> None:
    memory = CudaDriver(0).dma_buf(7 * PAGE + 512, 3 * PAGE)
    assert (memory.descriptor, memory.offset) == (77, 512)
    assert library.calls[-1][2:4] == (7 * PAGE, 4 * PAGE)


@pytest.mark.parametrize(
    ("ordering", "flushes"), [(0, 1), (100, 0), (200, 0)], ids=["none", "owner", "all"]
)
def test_writes_of_others_are_flushed_unless_they_come_in_order(
    library: Library, ordering: int, flushes: int
) -> None:
    library.attributes[ORDERING] = ordering
    driver = CudaDriver(0)
    driver.dma_buf(0, PAGE)
    driver.flush()
    flushed = [call[1:] for call in library.calls if call[0] == "cuFlushGPUDirectRDMAWrites"]
    assert flushed == [(0, 100)] * flushes


@pytest.mark.parametrize(
    ("attributes", "why"),
    [({DMA_BUF: 0}, "do not export"), ({FLUSH_OPTIONS: 2}, "neither be waited for nor flushed")],
)
def test_no_dma_buf_where_it_could_not_be_used(
    library: Library, attributes: dict[int, int], why: str
) -> None:
    library.attributes |= attributes
    with pytest.raises(CudaError, match=why):
        CudaDriver(0).dma_buf(0, PAGE)


def test_failures_have_names(library: Library) -> None:
    driver = CudaDriver(0)
    library.fails["cuIpcGetMemHandle"] = 800
    with pytest.raises(CudaError, match="cuIpcGetMemHandle: CUDA_ERROR_NOT_PERMITTED"):
        driver.export(library.base)
    library.fails["cuIpcGetMemHandle"] = 4711
    with pytest.raises(CudaError, match="cuIpcGetMemHandle: error 4711"):
        driver.export(library.base)
    del library.cuMemGetHandleForAddressRange  # type: ignore[attr-defined]
    with pytest.raises(CudaError, match="too old: it has no cuMemGetHandleForAddressRange"):
        driver.dma_buf(0, PAGE)
