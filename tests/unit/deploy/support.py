"""Where the deployment's files are, the tools that check them, and the commands they name."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.cli.main import make_parser
from shared.config import PREFIX

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
MODULE = ["-m", "services.cli"]
ROLES = {"gateway", "planner", "registry", "node"}


def tool(name: str) -> str:
    """A checker of this environment, else of PATH; the test is skipped without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: this file goes unchecked")
    return found


def settings(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(PREFIX)}


def variables_in(path: Path) -> dict[str, str]:
    """The variables that a file of NAME=VALUE lines sets."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def role_of(arguments: Sequence[str]) -> str:
    """What the command line runs; SystemExit if the command has no such arguments."""
    return str(getattr(make_parser().parse_args(arguments), "role", arguments[0]))
