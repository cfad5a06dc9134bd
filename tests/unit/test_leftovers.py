"""A run that leaves a process behind fails, names it and ends it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES_ONE = """
import subprocess

def test_it() -> None:
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("left", left.pid)
    left.returncode = 0  # so that nobody warns of it
"""


USES_SPAWN = """
import multiprocessing

def test_it() -> None:
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")


def run(folder: Path, test: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_it.py").write_text(test)
    plugin = "from tests.support import leftovers; leftovers.PATIENCE_S = 0.2\n"
    (folder / "conftest.py").write_text(
        plugin + "def pytest_configure(config):\n"
        "    config.pluginmanager.register(leftovers.Leftovers())\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_that_leaves_a_process_fails_and_ends_it(tmp_path: Path) -> None:
    ran = run(tmp_path, LEAVES_ONE)
    assert ran.returncode == 1, ran.stdout
    assert "1 passed" in ran.stdout
    pid = next(line.split()[-1] for line in ran.stdout.splitlines() if "left " in line)
    assert f"process {pid}: sleep 1000" in ran.stdout
    assert "sleep" not in _command(int(pid))


def test_what_python_ends_with_the_run_is_not_left(tmp_path: Path) -> None:
    ran = run(tmp_path, USES_SPAWN)
    assert ran.returncode == 0, ran.stdout


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
