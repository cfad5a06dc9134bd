"""Hardware as data: what nodes, links and memories are modelled with (`data/hardware/*.toml`)."""

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
    """One accelerator, and its share of the machine that it is in. Rates: bytes/s, one way."""

    name: str
    memory_bytes: Positive
    """Of the accelerator."""
    hbm_bytes_per_s: Positive
    mbu: Share
    """Part of the memory's rate that reading weights and KV reaches."""
    flops: Positive
    """Peak, dense, in the models' dtype (bf16)."""
    mfu: Share
    """Part of it that a prefill reaches."""
    sweep_overhead_s: NotNegative
    """Of a pass over any run of blocks: scheduling, sampling, launch."""
    layer_overhead_s: NotNegative
    """Of a layer: the launches of its kernels."""
    pcie_bytes_per_s: Positive
    """Host memory to accelerator, as reached."""
    nic_bytes_per_s: Positive
    """Line rate of the node's link, each way."""
    nic_efficiency: Share
    """Part of it that a large transfer reaches."""
    alpha_s: NotNegative
    """The planner's; modelled links themselves have their latency only."""
    ssd_bytes_per_s: Positive
    """Reading weights from the disk into the accelerator, as reached."""
    host_bytes: Positive
    """Host memory for copies of models, per accelerator."""
    nvlink_bytes_per_s: NotNegative
    """Between accelerators of one machine, each way; 0: there is none."""

    @property
    def link_bytes_per_s(self) -> float:
        return self.nic_bytes_per_s * self.nic_efficiency

    @property
    def read_bytes_per_s(self) -> float:
        """Of the accelerator's memory."""
        return self.hbm_bytes_per_s * self.mbu

    @property
    def compute_flops(self) -> float:
        return self.flops * self.mfu


def hardware(name: str) -> Hardware:
    """ConfigError: there is none of that name, or its file is not right."""
    return read_data(DATA, name, Hardware)


def read_data(folder: Path, name: str, kind: type[T]) -> T:
    """The file `<name>.toml` of a folder, whose `name` is its file's."""
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
        """Until so many bytes are across, behind all that was given before. What was begun is
        carried to its end, also when this is cancelled."""
        start = max(now(), self._free_at)
        self._free_at = start + nbytes / self._bytes_per_s
        await asyncio.sleep(self._free_at - now())
