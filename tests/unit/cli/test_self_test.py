"""`lambdascale test`: what it checks, what it runs, and that the fast part stays fast."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli import self_test
from services.cli.self_test import FAST, ROOT

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.exit("torch" in sys.modules)
"""


def test_fast_tests_take_no_torch() -> None:
    files = [
        file
        for path in map(ROOT.joinpath, FAST)
        for file in (sorted(path.glob("**/test_*.py")) if path.is_dir() else [path])
    ]
    assert files
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    command = [sys.executable, "-c", IMPORT_ALL, "tests.conftest", *modules]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (["-k", "costs"], []),
        (["tests/unit/planner/test_costs.py::test_x[1]"],
         ["services/planner", "tests/unit/planner/test_costs.py"]),
        (["tests/unit/deploy"], ["tests/unit/deploy"]),  # deploy has no Python
        (["-x", "tests/unit/planner/multicast"],
         ["services/planner", "tests/unit/planner/multicast"]),
        (["tests/unit/simulation", "tests/sim"],
         ["simulation", "tests/sim", "tests/unit/simulation"]),
        (["tests/unit/node/test_room.py", "tests/unit/node/execution"],
         ["services/node", "tests/unit/node/execution", "tests/unit/node/test_room.py"]),
    ],
)  # fmt: skip
def test_paths_are_checked_with_what_they_test(rest: list[str], expected: list[str]) -> None:
    assert self_test._checked(self_test._paths(rest)) == [Path(name) for name in expected]


def test_processes_of_the_tests_keep_their_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked.py").write_text("import sys; sys.exit(sys.dont_write_bytecode)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(tmp_path))))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert self_test._start(["asked"]).wait() == 0


def test_a_failure_of_any_check_is_named_and_is_the_exit_code(tmp_path: Path) -> None:
    bad = tmp_path / "test_bad.py"
    bad.write_text("def test_x( ) -> None:\n    assert False, 1 + 'x'\n")
    command = [sys.executable, "-m", "services.cli", "test", "-p", "no:cacheprovider", str(bad)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "lambdascale: failed: ruff format, ruff check, pytest, mypy"


HOW_MANY = """
from hypothesis import settings
from tests.support.amounts import amount, cases

def test_amounts() -> None:
    found = (amount(2, thorough=3), cases([1], thorough=[1, 2]), settings().max_examples)
    assert found == EXPECTED
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], (2, [1], 40)), (["--fast"], (2, [1], 14)), (["--thorough"], (3, [1, 2], 320))],
)
def test_a_thorough_run_tries_more_and_a_fast_one_less(
    arguments: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(self_test.AMOUNT, raising=False)
    test = tmp_path / "test_amounts.py"
    test.write_text(HOW_MANY.replace("EXPECTED", repr(expected)))
    how = [*arguments, "-p", "tests.conftest", "-p", "no:cacheprovider", str(test)]
    command = [sys.executable, "-m", "services.cli", "test", *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


ONCE = """
from pathlib import Path

def test_once() -> None:
    there = Path(__file__).with_name("ran")
    assert there.exists() or not there.write_text("ran")

def test_sound() -> None:
    pass
"""


def test_what_failed_first_and_passed_alone_is_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_once.py").write_text(ONCE)
    monkeypatch.setattr(self_test, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    checks: list[str] = []
    start = self_test._start

    def only_pytest(command: list[str], **how: Any) -> "subprocess.Popen[str]":
        checks.append(command[0])
        return start(command if command[0] == "pytest" else ["platform"], **how)

    monkeypatch.setattr(self_test, "_start", only_pytest)
    assert self_test.run(argparse.Namespace(rest=[], fast=False, thorough=False)) == 0
    last = capfd.readouterr().err.splitlines()[-2:]
    assert last[0].startswith(
        "lambdascale: WARNING: 1 tests failed first, and passed when they ran"
    )
    assert last[1] == "  test_once.py::test_once"
    assert checks.count("pytest") == 2
