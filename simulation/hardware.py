"""Hardware as data: the parameters that nodes, links and memories are modelled with
(`data/hardware/*.toml`)."""

import asyncio
import tomllib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from shared.clock import now
from shared.errors import ConfigError

DATA = Path(__file__).parent / "data" / "hardware"

T = TypeVar("T", bound=msgspec.Struct)
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator with its share of the machine that it is in. Rates are bytes/s in one
    direction."""

    name: str
    memory_bytes: Positive
    """The accelerator's memory."""
    hbm_bytes_per_s: Positive
    mbu: Share
    """The share of the memory's rate that reading weights and KV reaches."""
    flops: Positive
    """Peak rate of dense products in the models' dtype (bf16)."""
    mfu: Share
    """The share of the peak that a prefill reaches."""
    sweep_overhead_s: NotNegative
    """What a pass over any run of blocks costs beside its work: scheduling, sampling, launch."""
    layer_overhead_s: NotNegative
    """What the launches of a layer's kernels cost."""
    pcie_bytes_per_s: Positive
    """From host memory to the accelerator, as reached in practice."""
    nic_bytes_per_s: Positive
    """Line rate of the node's link in each direction."""
    nic_efficiency: Share
    """The share of the line rate that a large transfer reaches."""
    alpha_s: NotNegative
    """alpha of the planner's predictions. The modelled links themselves have only their latency."""
    ssd_bytes_per_s: Positive
    """From the disk into the accelerator, for weights, as reached in practice."""
    host_bytes: Positive
    """Host memory for copies of models, per accelerator."""
    nvlink_bytes_per_s: NotNegative
    """Between accelerators of one machine, in each direction. 0: there is no such link."""

    @property
    def link_bytes_per_s(self) -> float:
        return self.nic_bytes_per_s * self.nic_efficiency

    @property
    def read_bytes_per_s(self) -> float:
        """The rate at which the accelerator reads its memory in practice."""
        return self.hbm_bytes_per_s * self.mbu

    @property
    def compute_flops(self) -> float:
        return self.flops * self.mfu


def hardware(name: str) -> Hardware:
    """The hardware of this name. ConfigError if there is none, or if its file is wrong."""
    return read_data(DATA, name, Hardware)


def read_data(folder: Path, name: str, kind: type[T]) -> T:
    """The file `<name>.toml` of a folder. The `name` inside must be the file's."""
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise ConfigError(f"no {name!r} in {folder}: there are {', '.join(known)}")
    path = folder / f"{name}.toml"
    try:
        return msgspec.convert({"name": name} | tomllib.loads(path.read_text()), kind)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: {error}; its keys are {', '.join(kind.__struct_fields__)}"
        ) from error


class Channel:
    """Carries one thing after the other at its rate (a disk, a PCIe link)."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def carry(self, nbytes: float) -> None:
        """Returns when `nbytes` bytes are across, behind everything that was given before. What was
        begun is carried to its end, even if this call is cancelled."""
        start = max(now(), self._free_at)
        self._free_at = start + nbytes / self._bytes_per_s
        await asyncio.sleep(self._free_at - now())
