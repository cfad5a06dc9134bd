"""What the project says it needs is what the launcher installs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
BY_THE_LAUNCHER = {"torch"}
"""Installed from a lock of its own, since its builds differ by machine."""
HASHED = re.compile(
    r"(?m)^([A-Za-z0-9._-]+==\S+)(?: ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+$"
)


def names(lines: list[str]) -> set[str]:
    found = [re.match(r"[A-Za-z0-9._-]+", line) for line in lines]
    return {re.sub(r"[._]", "-", match[0]).lower() for match in found if match}


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = names((ROOT / "requirements/run.lock").read_text().splitlines())
    wanted = names((ROOT / "requirements/run.in").read_text().splitlines())
    assert names(project["dependencies"]) - BY_THE_LAUNCHER <= wanted <= locked


def test_every_locked_package_has_its_hashes() -> None:
    """pip says nothing of a lock without hashes unless it is told to."""
    for name in ("run", "dev", "torch"):
        lock = (ROOT / f"requirements/{name}.lock").read_text()
        pinned = re.findall(r"(?m)^[A-Za-z0-9._-]+==\S+", lock)
        assert pinned == [found[0] for found in HASHED.findall(lock)]


def test_torch_is_the_version_that_the_wheel_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = (each for each in project["dependencies"] if each.startswith("torch"))
    assert f"\n{asked}+cpu " in (ROOT / "requirements/torch.lock").read_text()
