"""`lambdascale test`: formatting, lint, types and the whole test suite."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHECKS = {
    "ruff format": ["ruff", "format", "--check", "--quiet", "."],
    "ruff check": ["ruff", "check", "--quiet", "."],
    "mypy": ["mypy"],
}


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "test",
        help="check formatting, lint and types, then run the test suite",
        description="Checks formatting, lint and types, then runs the whole test suite. Further "
        "arguments go to pytest (try -k NAME); with any, only pytest runs.",
        usage="lambdascale test [-h] [PYTEST ARGUMENT ...]",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    failed = [] if args.rest else [name for name, command in CHECKS.items() if _run(command)]
    if _run(["pytest", *args.rest]):
        failed.append("pytest")
    if failed:
        sys.stderr.write(f"lambdascale: failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _run(command: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode
