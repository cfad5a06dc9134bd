"""How much of the machine's memory is still available. A process that takes more is not refused but
killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class HostMemory(NamedTuple):
    """In bytes."""

    left: int
    """What can still be taken."""
    whole: int
    """What there is, taken or not."""


def host_memory(root: Path = ROOT) -> HostMemory:
    """The least over the machine and every control group of this process that has a limit. `root`:
    where to look for the kernel's files."""
    machine = _fields(root / "proc/meminfo", ":")
    limits = [
        HostMemory(machine["MemAvailable"] << 10, machine["MemTotal"] << 10),
        *_groups(root),
    ]
    return HostMemory(
        max(0, min(limit.left for limit in limits)), min(limit.whole for limit in limits)
    )


def _groups(root: Path) -> Iterator[HostMemory]:
    """The control groups with a limit, from this process's own upwards; in a container, up to the
    first that is visible."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
            files = "inactive_file"
        elif "memory" in controllers.split(","):  # control groups of version 1
            mount, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, files = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount) or not (folder / limit).exists():
                continue
            most = (folder / limit).read_text().strip()
            if most != "max":
                taken = int((folder / used).read_text())
                taken -= _fields(folder / "memory.stat", " ").get(files, 0)
                yield HostMemory(int(most) - taken, int(most))


def _fields(path: Path, separator: str) -> dict[str, int]:
    """The numbers of a file that has a name and a number in each line."""
    lines = (line.partition(separator) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.strip()}
