"""Kernels are compiled once for a machine, and done without where they can't be."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.node import compiling
from services.node.engine import kernels
from tests.support.compilers import QUICKLY, quick_compiler

CACHE = os.environ.get("XDG_CACHE_HOME", "")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.load.cache_clear()
    yield tmp_path / "lambdascale"
    kernels.load.cache_clear()


def libraries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_compiled_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FLAGS", (*kernels.FLAGS, QUICKLY))
    assert kernels.load() is not None
    (library,) = libraries(empty_cache)
    made = library.stat().st_mtime_ns
    kernels.load.cache_clear()
    assert kernels.load() is not None
    assert library.stat().st_mtime_ns == made
    kernels.load.cache_clear()
    monkeypatch.setattr(compiling, "_processor", lambda: "another")
    assert kernels.load() is not None
    assert len(libraries(empty_cache)) == 2


TOGETHER = """
import os
from services.node.engine import kernels
from tests.support.compilers import QUICKLY, quick_compiler
from services.node.transport import native

started = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(not (kernels.load() and native.load()))
    started.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in started] == [0, 0, 0]
"""
"""Processes that have imported torch once for all of them."""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_processes_that_start_together_compile_once_and_later_ones_not_at_all(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", quick_compiler(tmp_path / "bin"))
    for _ in range(2):  # a second start compiles nothing
        subprocess.run([sys.executable, "-c", TOGETHER], check=True)
        assert (tmp_path / "bin" / "ran").read_text() == "ran\n" * 2
        assert sorted(path.name.partition("-")[0] for path in libraries(empty_cache)) == [
            "kernels",
            "relay",
        ]


ON_THREADS = """
import os, torch
from services.node.engine.linear import linear

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(5)
alone = threads()
linear(torch.ones(512, 512), None, "packed")(torch.ones(64, 512))
ours = threads()
torch.ones(1 << 22).exp()
print(ours - alone, threads() - ours)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE)
    command = [sys.executable, "-c", ON_THREADS]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.splitlines()[-1] == "4 0"


def compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernels.load() is None


def test_with_a_compiler_that_fails(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "bin", "echo no such option >&2; exit 1", monkeypatch)
    assert kernels.load() is None
    assert libraries(empty_cache) == []


def test_with_a_compiler_that_makes_rubbish(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    compiler(tmp_path / "bin", script, monkeypatch)
    assert kernels.load() is None
    assert libraries(empty_cache) == []


def test_without_a_place_for_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kernels.load() is None
