"""Tests in several processes report what they would report in one; dead processes lose none."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.self_test import ROOT

ALL_KINDS = """
import warnings
import pytest

@pytest.fixture(scope="module")
def broken():
    raise OSError("no such fixture")

@pytest.fixture
def ends_badly():
    yield
    raise OSError("at the end")

@pytest.mark.parametrize("n", range(20))
def test_passes(n): pass

def test_fails():
    print("what it printed")
    assert 1 == 2

@pytest.mark.skip(reason="not here")
def test_skipped(): pass

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False

def test_setup(broken): pass
def test_teardown(ends_badly): pass
def test_warns(): warnings.warn("a warning of its own", UserWarning)
"""
FIXTURES = """
import os, pathlib, pytest

@pytest.fixture(scope="session", autouse=True)
def session(tmp_path_factory):
    yield
    told("session")

@pytest.fixture(scope="module", autouse=True)
def module():
    yield
    told("module")

def told(what):
    with (pathlib.Path(__file__).parent / "ended").open("a") as file:
        file.write(f"{what} {os.getpid()}\\n")
"""
DIES = """
import os, signal

def test_before(): pass
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after(): pass
def test_last(): pass
"""
LEAVES_A_CHILD = """
import os, pathlib, signal, time

def test_dies():
    if (child := os.fork()) == 0:
        time.sleep(600)
    (pathlib.Path(__file__).parent / "child").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)

def test_after(): pass
"""
WAITS = """
import pathlib, subprocess, time

def test_waits():
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            (pathlib.Path(__file__).parent / "begun").write_text("")
            time.sleep(600)
        finally:
            sleeper.kill()
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def command(directory: Path, *arguments: str) -> list[str]:
    (directory / "pytest.ini").write_text("[pytest]\n")
    plugin = ["-p", "tests.support.side_by_side", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *plugin, "-rA", "--tb=short", *arguments, "."]


def run(directory: Path, *arguments: str, status: int = 1) -> str:
    done = subprocess.run(
        command(directory, *arguments),
        cwd=directory,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def results(said: str) -> Counter[str]:
    """The lines of the summary, and its counts."""
    lines = re.findall(r"^(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) .*", said, re.MULTILINE)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped|xfailed|warnings?)", said)
    return Counter([*lines, *counts])


def test_the_results_are_those_of_one_process(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(ALL_KINDS)
    alone, together = run(tmp_path), run(tmp_path, "--processes", "3")
    assert results(together) == results(alone)
    assert results(alone)["88 passed"]
    for once_a_file in ("what it printed", "a warning of its own", "assert 1 == 2", "at the end"):
        assert together.count(once_a_file) == alone.count(once_a_file) > 0, once_a_file


def test_fixtures_end_once_where_they_began(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(FIXTURES)
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_x(): pass\ndef test_y(): pass\n")
    assert "12 passed" in run(tmp_path, "--processes", "2", status=0)
    ended = Counter((tmp_path / "ended").read_text().splitlines())
    modules = {line.split()[1]: count for line, count in ended.items() if "module" in line}
    assert sum(modules.values()) == 6
    assert {line: count for line, count in ended.items() if "session" in line} == {
        f"session {process}": 1 for process in modules
    }


@pytest.mark.parametrize("processes", ["1", "4"])
def test_a_process_that_dies_fails_its_test_and_no_other(tmp_path: Path, processes: str) -> None:
    for name in "abcdefgh":
        (tmp_path / f"test_{name}.py").write_text(DIES)
    said = run(tmp_path, "--processes", processes)
    assert "8 failed, 24 passed" in said
    assert said.count("the process that ran it ended (status -9)") == 2 * 8  # and in the summary
    failed = re.findall("^FAILED (.*) - ", said, re.MULTILINE)
    assert sorted(failed) == [f"test_{name}.py::test_dies" for name in "abcdefgh"]


def test_a_process_that_dies_and_leaves_a_child(tmp_path: Path) -> None:
    """The child holds open what the process has spoken through."""
    (tmp_path / "test_a.py").write_text(LEAVES_A_CHILD)
    said = tmp_path / "said"
    try:
        with said.open("w") as output:
            done = subprocess.run(
                command(tmp_path, "--processes", "1"),
                cwd=tmp_path,
                env=ENVIRONMENT,
                stdout=output,
                check=False,
                timeout=120,
            )
        assert done.returncode == 1
        assert "1 failed, 1 passed" in said.read_text()
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_it_stops_after_the_first_failure_when_told(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_x(): assert False\ndef test_y(): pass\n")
    (tmp_path / "test_b.py").write_text(WAITS.replace("600)", "1.0)"))
    said = run(tmp_path, "-x", "--processes", "2")
    assert "stopping after 1 failures" in said
    assert "test_y" not in said


def test_nothing_runs_when_a_file_cannot_be_collected(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import nothing_like_it")
    (tmp_path / "test_b.py").write_text("def test_x(): pass\n")
    said = run(tmp_path, "--processes", "2", status=2)
    assert "1 error during collection" in said
    assert "passed" not in said


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """What this process starts heeds Ctrl-C, although a shell has what it starts in the background
    ignore it, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_what_a_test_has_started_ends_when_the_run_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(WAITS)
    with subprocess.Popen(
        command(tmp_path, "--processes", "2"),
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
        said, _ = running.communicate(timeout=60)  # what lives on keeps the pipe open
    assert running.returncode == 2
    assert "KeyboardInterrupt" in said
