"""What a node's engine computes on (`node.device`)."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.node.engine.graphs import Capture


def own_stream(device: torch.device) -> "Capture":
    """Makes this thread compute on a stream of its own from now on, so that copies on other streams
    run at the same time and launches can be recorded. ConfigError if Triton, which the kernels
    need, is missing."""
    if find_spec("triton") is None:
        raise ConfigError(
            f"node.device {device} needs Triton, which torch's builds for CUDA bring with them: "
            f"pip install the version that this torch requires"
        )
    from services.node.engine.graphs import CudaCapture

    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return CudaCapture(device)


def torch_device(name: str) -> torch.device:
    """The device of `node.device`. ConfigError if this machine cannot use it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"node.device {name!r} is not a device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"node.device {name!r} is not supported; supported: cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"node.device is {name!r}, but this machine has {count} CUDA devices")
    return device


def devices_of_ranks(name: str, degree: int) -> tuple[torch.device, ...]:
    """The devices of the ranks of a node on a GPU: `node.device`, which is `name`, and those after
    it. ConfigError if this machine has too few."""
    first = torch_device(name).index or 0
    count = torch.cuda.device_count()
    if first + degree > count:
        raise ConfigError(
            f"node.device is {name} and node.tensor_parallel is {degree}, which takes cuda:{first} "
            f"to cuda:{first + degree - 1}, and this machine has {count} CUDA devices: lower "
            f"node.tensor_parallel to {count - first} or less"
            + (", or set node.device to cuda:0" if first else "")
        )
    return tuple(torch.device("cuda", first + rank) for rank in range(degree))
