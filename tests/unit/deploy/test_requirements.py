"""What the project says it needs is what the launcher installs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
BY_THE_LAUNCHER = {"torch"}
"""Installed by itself, since its builds differ by machine."""


def names(lines: list[str]) -> set[str]:
    found = [re.match(r"[A-Za-z0-9._-]+", line) for line in lines]
    return {re.sub(r"[._]", "-", match[0]).lower() for match in found if match}


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = names((ROOT / "requirements/run.lock").read_text().splitlines())
    wanted = names((ROOT / "requirements/run.in").read_text().splitlines())
    assert names(project["dependencies"]) - BY_THE_LAUNCHER <= wanted <= locked
