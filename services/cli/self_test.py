"""`lambdascale test`: formatting, lint and types beside the tests."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import BadInput

ROOT = Path(__file__).parents[2]
FAST = (
    "tests/property",
    "tests/unit/cli/test_main.py",
    "tests/unit/gateway/dispatch",
    "tests/unit/gateway/test_admission.py",
    "tests/unit/gateway/test_routing.py",
    "tests/unit/node/batching",
    "tests/unit/node/test_profile.py",
    "tests/unit/node/test_pulling.py",
    "tests/unit/node/test_residency.py",
    "tests/unit/node/test_room.py",
    "tests/unit/node/test_speculation.py",
    "tests/unit/planner",
    "tests/unit/registry",
    "tests/unit/shared",
    "tests/unit/test_imports.py",
    "tests/unit/test_virtual_time.py",
)
"""Pure cores, and shells over a bus in memory. None of them needs torch or other processes."""
SLOW = "test_boundary.py"
"""Files among those that take too long: every handler meets every kind of failure."""
AMOUNT = "LS_TEST_AMOUNT"
"""The variable that says how much tests try (tests/support/amounts.py): `--fast` sets it to FEW,
`--thorough` to MUCH. (With the prefix of settings, services would refuse it.)"""
FEW, MUCH = "fast", "thorough"
KEEPS_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Images of Python often set it."""
SOME_FAILED = 1
"""The status of pytest when it ran to its end, and tests failed."""
LAST_FAILED = ".pytest_cache/v/cache/lastfailed"
MOST_WORKERS = 8
"""Each process needs up to 1 GB, and more for the processes that its tests start."""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    shown: dict[str, Any] = {"help": "check formatting, lint and types, and run the test suite"}
    parser = commands.add_parser(
        "test",
        **(shown if _in_a_checkout() else {}),  # what has no help is not listed
        description="Checks formatting, lint and types, and runs the whole test suite beside them, "
        "in several processes. With PATHs (of tests; PATH::NAME, too) it runs those tests in one "
        "process, and checks them and the package that they are named after. All other arguments "
        "go to pytest: try -k NAME, or -x.",
        usage="lambdascale test [-h] [--fast | --thorough] [PATH ...] [PYTEST ARGUMENT ...]",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--fast",
        action="store_true",
        help="only the tests that need neither torch nor other processes (a minute)",
    )
    amount.add_argument(
        "--thorough",
        action="store_true",
        help="more seeds, examples and combinations of the same tests (takes a few times as long)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the checks beside the tests. Format and lint take a second and are reported first."""
    if not _in_a_checkout():
        raise BadInput(
            "an installed package has no tests: "
            "run `./lambdascale test` in a clone of its repository"
        )
    paths = _paths(args.rest)
    checked = [str(path) for path in _checked(paths)]
    failed = [
        name
        for name, command in (
            ("ruff format", ["ruff", "format", "--check", "--quiet", "--diff"]),
            ("ruff check", ["ruff", "check", "--quiet"]),
        )
        if _start([*command, *(checked or ["."])]).wait()
    ]
    alone: list[str] = []
    environment = {AMOUNT: FEW if args.fast else MUCH if args.thorough else ""}
    pytest = ["pytest", *_pytest_arguments(args.rest, paths, fast=args.fast)]
    with (
        _start(["mypy", *checked], stdout=subprocess.PIPE) as types,
        _start(pytest, environment=environment) as tests,
    ):
        ended = tests.wait()
        if ended == SOME_FAILED and not paths:
            alone = _pass_alone(environment)
        if ended and not alone:
            failed.append("pytest")
        said, _ = types.communicate()  # printed at the end, not among the tests' dots
        sys.stdout.write(said)
        if types.returncode:
            failed.append("mypy")
    if alone:
        sys.stderr.write(_warning(alone))
    if failed:
        sys.stderr.write(f"lambdascale: failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _in_a_checkout() -> bool:
    return (ROOT / "tests").is_dir()


def _pass_alone(environment: Mapping[str, str]) -> list[str]:
    """The tests that failed beside others, if all of them pass when nothing runs beside them: tests
    of real processes can starve on a busy machine. Otherwise none."""
    sys.stderr.write("lambdascale: the tests that failed run again, one at a time\n")
    failed = _last_failed()
    arguments = ["--last-failed", "--last-failed-no-failures=none", "-q"]
    again = _start(["pytest", *arguments], environment=environment)
    return [] if again.wait() else failed


def _last_failed() -> list[str]:
    """What pytest has noted to run again."""
    try:
        return sorted(json.loads((ROOT / LAST_FAILED).read_text()))
    except (OSError, ValueError):
        return []


def _warning(tests: Sequence[str]) -> str:
    """What is said at the very end, where nobody overlooks it."""
    return (
        f"lambdascale: WARNING: {len(tests)} tests failed first, and passed when they ran alone. A "
        "busy machine may be the reason, or a fault that shows only now and then:\n"
        + "".join(f"  {test}\n" for test in tests)
    )


def _start(
    command: list[str], *, stdout: int | None = None, environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**_environment(), **(environment or {})},
        text=True,
        stdout=stdout,
    )


def _environment() -> dict[str, str]:
    """This process's environment, in which Python keeps its bytecode: the tests start hundreds of
    processes, and each would compile all that it imports."""
    return {name: value for name, value in os.environ.items() if name != KEEPS_NO_BYTECODE}


def workers(cores: int, *, fast: bool) -> int:
    """The number of processes that run tests: more than cores, because three of them run tests that
    wait (tests/support/dealing.py). Fast tests do not wait."""
    return min(cores if fast else cores + 3, MOST_WORKERS)


def _pytest_arguments(rest: Sequence[str], paths: Sequence[Path], *, fast: bool) -> list[str]:
    """The arguments of pytest."""
    if paths:
        return list(rest)
    count = workers(os.cpu_count() or 1, fast=fast)
    side_by_side = ["-p", "tests.support.side_by_side", "--processes", str(count), *rest]
    return [*side_by_side, f"--ignore-glob=*/{SLOW}", *FAST] if fast else side_by_side


def _paths(rest: Sequence[str]) -> list[Path]:
    """The files and folders, relative to ROOT, that are among pytest's arguments."""
    names = [word.partition("::")[0] for word in rest if not word.startswith("-")]
    return [Path(name) for name in names if (ROOT / name).exists()]


def _checked(paths: Sequence[Path]) -> list[Path]:
    """The paths and what they test: services/planner for tests/unit/planner/test_costs.py. What is
    within another one is left out: mypy takes no file twice."""
    every = {*paths, *(source for path in paths if (source := _tested(path)))}
    return sorted(path for path in every if every.isdisjoint(path.parents))


def _tested(path: Path) -> Path | None:
    """The longest path in the sources that this path of tests/unit mirrors, if it has Python."""
    if path.parts[:2] != ("tests", "unit"):
        return None
    for end in range(len(path.parts), 2, -1):
        mirrored = Path(*path.parts[2:end])
        for source in (Path("services") / mirrored, mirrored):
            if any((ROOT / source).glob("*.py")):
                return source
    return None
