"""Memory that can be had, by the files in which Linux says it."""

from pathlib import Path

import pytest

from services.node.memory.available import HostMemory, host_memory

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 64 GiB with 48 to be had, without limits."""
    write(
        tmp_path / "proc/meminfo",
        f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\nHugePages_Total: 0\n",
    )
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(folder: Path, most: str, used: int = 0, files: int = 0) -> None:
    write(folder / "memory.max", f"{most}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon {used - files}\ninactive_file {files}\n")


def test_without_limits_it_is_the_machine_s(root: Path) -> None:
    limit(root / "sys/fs/cgroup", "max", used=GIB)
    assert host_memory(root) == HostMemory(48 * GIB, 64 * GIB)


def test_a_container_has_what_its_limit_leaves(root: Path) -> None:
    """Files that the kernel caches for it are given up when memory is wanted."""
    limit(root / "sys/fs/cgroup", str(4 * GIB), used=3 * GIB, files=2 * GIB)
    assert host_memory(root) == HostMemory(3 * GIB, 4 * GIB)


def test_the_limit_of_a_group_further_up_holds_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/slice/node.service\n")
    limit(root / "sys/fs/cgroup/slice/node.service", str(8 * GIB), used=GIB)
    limit(root / "sys/fs/cgroup/slice", str(10 * GIB), used=9 * GIB)
    assert host_memory(root) == HostMemory(GIB, 8 * GIB)


def test_who_is_over_the_limit_has_nothing_left(root: Path) -> None:
    limit(root / "sys/fs/cgroup", str(GIB), used=2 * GIB)
    assert host_memory(root).left == 0


def test_version_1_groups(root: Path) -> None:
    write(root / "proc/self/cgroup", "7:blkio:/\n4:cpu,memory:/docker/abc\n0::/\n")
    folder = root / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", str(4 * GIB))
    write(folder / "memory.usage_in_bytes", str(GIB))
    write(folder / "memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    assert host_memory(root) == HostMemory(4 * GIB, 4 * GIB)


def test_this_machine_says_something() -> None:
    left, whole = host_memory()
    assert 0 < left <= whole
