"""Host memory that a GPU reads by itself, at the rate of its bus."""

import threading

import torch

from shared.errors import CapacityExceeded

_READ_ONLY = 8
"""cudaHostRegisterReadOnly. Without it, memory that is mapped for reading cannot be locked."""


def page_lock(device: torch.device, start: int, nbytes: int, *, read_only: bool = False) -> None:
    """CapacityExceeded if the system does not allow it; then the next kernel of this thread fails,
    too, since CUDA keeps the failure for it to report. `start`: an address. `read_only`: so the
    memory is mapped."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        status = int(cudart.cudaHostRegister(start, nbytes, _READ_ONLY if read_only else 0))
    if status:
        raise CapacityExceeded(
            f"{nbytes} bytes of host memory cannot be page-locked: {torch.cuda.CudaError(status)}"
        )


def page_unlock(device: torch.device, start: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]


def try_page_lock(device: torch.device, start: int, nbytes: int, *, read_only: bool = False) -> str:
    """The same on any thread. Returns why the memory is not locked; empty: it is."""
    failed: list[str] = []

    def lock() -> None:
        try:
            page_lock(device, start, nbytes, read_only=read_only)
        except CapacityExceeded as error:
            failed.append(str(error))

    thread = threading.Thread(target=lock, name="page-lock")
    thread.start()
    thread.join()
    return "".join(failed)
