"""The Dockerfile: lint, what it copies, and what it runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.main import make_parser
from shared.config import load
from shared.version import __version__
from tests.unit.deploy.support import MODULE, ROOT, settings, tool

DOCKERFILE = (ROOT / "Dockerfile").read_text()
DATA_DIR = "/var/lib/lambdascale"
LINES = DOCKERFILE.replace("\\\n", " ").splitlines()


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(f"{name} ")]


def test_hadolint_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_what_is_copied_into_the_build_exists_and_is_let_through() -> None:
    sources = [line.split()[0] for line in instructions("COPY") if "--from" not in line]
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert set(sources) == let_through
    assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """/opt/lambdascale as the build makes it, but for the virtual environment."""
    for line in instructions("COPY"):
        if "--from" not in line:
            source, target = line.split()
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, tmp_path / target, ignore=ignored)
            else:
                (tmp_path / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / target)
    return tmp_path


def run_in(tree: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.run(
        [sys.executable, *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_command_runs_in_the_image(tree: Path) -> None:
    assert run_in(tree, *MODULE, "--version").strip() == __version__
    packages = ("shared", "services", "simulation", "benchmarks")
    imports = f"import {', '.join(packages)}; "
    found = run_in(tree, "-c", f"{imports}print({', '.join(f'{p}.__file__' for p in packages)})")
    assert found.split() == [str(tree / package / "__init__.py") for package in packages]


def test_everything_that_is_copied_is_compiled() -> None:
    """The root may be read-only."""
    compiled = next(line for line in instructions("RUN") if "compileall" in line)
    copied = {line.split()[0] for line in instructions("COPY") if "--from" not in line}
    packages = {source for source in copied if (ROOT / source).is_dir()}
    assert set(compiled.split("-q ")[1].split()) == packages


def test_what_is_compiled_does_not_depend_on_when_it_was_built() -> None:
    (build,) = (line for line in instructions("ENV") if "SOURCE_DATE_EPOCH" in line)
    assert "PYTHONHASHSEED=0" in build


def test_the_nodes_volume_gets_no_dotfiles() -> None:
    """A volume begins with what its directory holds in the image."""
    (line,) = (line for line in instructions("RUN") if "useradd" in line)
    assert "--create-home" not in line
    assert f"install -d -o lambdascale -g lambdascale -m 750 {DATA_DIR}" in " ".join(line.split())


def test_the_entry_point_is_the_operators_command() -> None:
    (entry,) = (json.loads(text) for text in instructions("ENTRYPOINT"))
    assert entry == ["python", *MODULE]
    assert make_parser().parse_args(["node"]).role == "node"


def test_the_final_stage_is_not_root_and_its_settings_are_known() -> None:
    assert instructions("USER") == ["10001:10001"]
    variables = dict(
        pair.split("=", 1) for line in instructions("ENV") for pair in re.findall(r"\S+=\S+", line)
    )
    config = load(None, settings(variables))
    assert config.node.data_dir == DATA_DIR


def test_stages_share_one_pinned_base() -> None:
    bases = [line.split()[0] for line in instructions("FROM")]
    assert bases == ["${BASE}", "base", "base"]
    assert instructions("ARG")[0] == "BASE=python:3.11-slim-bookworm"
