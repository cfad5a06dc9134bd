"""How much of the machine's memory can still be had: who takes more is not refused, but killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class HostMemory(NamedTuple):
    """Bytes."""

    left: int
    """That can still be had."""
    whole: int
    """That there are, taken or not."""


def host_memory(root: Path = ROOT) -> HostMemory:
    """By the machine, and by the limit of every control group that this process is in.
    `root`: of the files that say so."""
    machine = _fields(root / "proc/meminfo", ":")
    limits = [
        HostMemory(machine["MemAvailable"] << 10, machine["MemTotal"] << 10),
        *_groups(root),
    ]
    return HostMemory(
        max(0, min(limit.left for limit in limits)), min(limit.whole for limit in limits)
    )


def _groups(root: Path) -> Iterator[HostMemory]:
    """Those with a limit, from this process's up; in a container the first that it sees."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
            files = "inactive_file"
        elif "memory" in controllers.split(","):  # version 1
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
    """The numbers of a file with a name and a number a line."""
    lines = (line.partition(separator) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.strip()}
