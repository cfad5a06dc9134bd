"""What an RDMA device does with the memory of a GPU; pyverbs and CUDA's driver are doubles."""

import ctypes
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from structlog.testing import capture_logs

from services.node import transport
from services.node.memory.arena import Arena
from services.node.memory.landing import Landing
from services.node.memory.ranges import Ranges
from services.node.memory.views import address
from tests.support.device_memory import HostDriver, Machine

ROOM = 1 << 16
WRITE, READ, ACTIVE = 1, 4, 4
LKEY, DEVICE_LKEY, RKEY = 11, 22, 33


class PyverbsError(Exception):
    pass


class Adapter:
    """What pyverbs was asked to register."""

    def __init__(self) -> None:
        self.takes_dma_buf = True
        self.registered: list[tuple[Any, ...]] = []
        self.descriptors: list[int] = []

    def memory(self, pd: object, nbytes: int, access: int, address: int) -> SimpleNamespace:
        assert access == WRITE | READ
        return SimpleNamespace(buf=address, lkey=LKEY, rkey=RKEY)

    def dma_buf(
        self, pd: object, nbytes: int, access: int, dmabuf: int, offset: int
    ) -> SimpleNamespace:
        os.fstat(dmabuf)
        self.descriptors.append(dmabuf)
        self.registered.append((nbytes, access, offset))
        if not self.takes_dma_buf:
            raise PyverbsError(
                "Failed to register a dma-buf MR. Errno: 95, Operation not supported"
            )
        return SimpleNamespace(lkey=DEVICE_LKEY)


@pytest.fixture
def adapter() -> Adapter:
    return Adapter()


@pytest.fixture
def verbs(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    enums = MagicMock(
        IBV_ACCESS_LOCAL_WRITE=WRITE, IBV_ACCESS_REMOTE_READ=READ, IBV_PORT_ACTIVE=ACTIVE
    )
    context = MagicMock()
    context.return_value.query_port.return_value.state = ACTIVE
    context.return_value.query_device.return_value = SimpleNamespace(
        max_qp_init_rd_atom=16, max_qp_rd_atom=16
    )
    context.return_value.query_gid.return_value = "::1"
    # `import pyverbs.enums as` takes it from the package.
    modules: dict[str, object] = {
        "": MagicMock(__spec__=MagicMock(), enums=enums),
        ".enums": enums,
        ".addr": MagicMock(),
        ".cq": MagicMock(),
        ".device": SimpleNamespace(Context=context),
        ".mr": SimpleNamespace(MR=adapter.memory, DmaBufMR=adapter.dma_buf),
        ".pd": MagicMock(),
        ".pyverbs_error": SimpleNamespace(PyverbsError=PyverbsError, PyverbsRDMAError=PyverbsError),
        ".qp": MagicMock(),
        ".wr": MagicMock(),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"pyverbs{name}", module)
    before = sys.modules.pop(f"{transport.__name__}.verbs", None)
    yield importlib.import_module(f"{transport.__name__}.verbs")
    del sys.modules[f"{transport.__name__}.verbs"], transport.verbs  # type: ignore[attr-defined]
    if before is not None:
        sys.modules[before.__name__] = transport.verbs = before  # type: ignore[attr-defined]


class Gpu:
    def __init__(self, machine: Machine) -> None:
        self.arena, self.driver = Arena(ROOM), HostDriver(machine)
        self._bytes = (ctypes.c_char * (2 * ROOM))()
        self.pointer = ctypes.addressof(self._bytes) + 100
        """Not where a page begins."""
        self.landing = Landing(self.arena.memory, self.pointer, Ranges(), lambda: self.driver)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def gpu(machine: Machine) -> Iterator[Gpu]:
    gpu = Gpu(machine)
    yield gpu
    gpu.landing.close()


def test_reads_go_to_the_device(verbs: ModuleType, adapter: Adapter, gpu: Gpu) -> None:
    device = verbs.Device("mlx5_0", 3, [gpu.arena.memory], gpu.landing)
    gpu.arena.allocate(5000)
    block = gpu.arena.allocate(1000).memory
    into_dma_buf = gpu.pointer % os.sysconf("SC_PAGESIZE")
    assert adapter.registered == [(ROOM, WRITE, into_dma_buf)]
    assert device.target(block) == verbs.Target(DEVICE_LKEY, into_dma_buf + 8192, gpu.landing)
    # Peers read from the host's memory, which has all that may be read.
    registration, place = device.locate(block)
    assert (registration.rkey, place) == (RKEY, address(block))
    assert device.target(memoryview(bytearray(10))) is None
    assert gpu.landing.ways == ["GPUDirect RDMA"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(adapter.descriptors[0])


@pytest.mark.parametrize("lacks", ["the adapter", "the GPU", "it is not asked for"])
def test_reads_go_to_the_host_where_the_device_is_not_reached(
    verbs: ModuleType, adapter: Adapter, machine: Machine, gpu: Gpu, lacks: str
) -> None:
    adapter.takes_dma_buf = lacks != "the adapter"
    machine.exports = lacks != "the GPU"
    landing = gpu.landing if lacks != "it is not asked for" else None
    with capture_logs() as logs:
        device = verbs.Device("mlx5_0", 3, [gpu.arena.memory], landing)
    block = gpu.arena.allocate(1000).memory
    assert device.target(block) == verbs.Target(LKEY, address(block), None)
    assert gpu.landing.ways == []
    warnings = [line["why"] for line in logs if line["log_level"] == "warning"]
    assert len(warnings) == (landing is not None)
    for descriptor in adapter.descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
