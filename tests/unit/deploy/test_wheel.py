"""The package that others install: it runs in an environment that knows no source tree."""

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import aiohttp
import pytest

from services.local import processes
from shared.version import __version__
from tests.support.commands import Ran
from tests.unit.deploy.support import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--quiet", "--no-deps", "--no-index"]
SETTINGS = {
    "LAMBDASCALE_NODE_ARENA_BYTES": str(64 << 20),
    "LAMBDASCALE_NODE_KV_BYTES": str(32 << 20),
    "LAMBDASCALE_NODE_THREADS": "1",
}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    _succeed([*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(directory), str(ROOT)])
    (built,) = directory.iterdir()
    assert built.name == f"lambdascale-{__version__}-py3-none-any.whl"
    return built


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lambdascale` as pip installs it into a new environment, which sees the packages that these
    tests have, but not the repository."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False, symlinks=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    server = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    assert server is not None  # of a package that the wheel needs, and pip puts it there
    (directory / "bin" / "nats-server").symlink_to(server)
    python = directory / "bin" / "python"
    _succeed([*PIP, "--python", str(python), "install", *OFFLINE, "--no-compile", str(wheel)])
    return directory / "bin" / "lambdascale"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """Where commands run; whatever a test leaves running there is ended."""
    yield tmp_path
    processes.end_all(tmp_path / "lambdascale-data")


def _succeed(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS


def run(program: Path, *words: str, at: Path) -> Ran:
    command = [str(program), *words]
    done = subprocess.run(
        command, cwd=at, env=_environment(), capture_output=True, text=True, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_it_says_its_version(program: Path, tmp_path: Path) -> None:
    assert run(program, "--version", at=tmp_path).out.strip() == __version__


def test_benchmarks_are_part_of_it(program: Path, tmp_path: Path) -> None:
    assert "multicast" in run(program, "bench", "--help", at=tmp_path).out


def test_the_simulations_data_is_part_of_it(program: Path, tmp_path: Path) -> None:
    assert "h800-400g" in run(program, "simulate", "--help", at=tmp_path).out


def test_its_tests_are_in_the_repository_and_it_says_so(program: Path, tmp_path: Path) -> None:
    assert "\n    test " not in run(program, "--help", at=tmp_path).out
    ran = run(program, "test", at=tmp_path)
    assert (ran.code, "in a clone of its repository" in ran.err) == (2, True)


def test_every_file_that_is_no_code_comes_along(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "services", "shared", "simulation", "benchmarks"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert set(listed.stdout.split()) <= packed
    assert not [name for name in packed if name.startswith("tests/")]
    shared = f"lambdascale-{__version__}.data/data/share/lambdascale"
    assert f"{shared}/grafana/dashboards/lambdascale.json" in packed
    assert f"{shared}/prometheus/rules.yml" in packed


async def test_it_serves(program: Path, elsewhere: Path) -> None:
    words = ("up", "--nodes", "1", "--port", "0", "--detach", "--json")
    up = await asyncio.to_thread(run, program, *words, at=elsewhere)
    assert up.code == 0, up.err
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        url = up.document["gateway_url"] + "/v1/completions"
        async with session.post(url, json=body) as response:
            answer = await response.json()
    assert answer["usage"]["completion_tokens"] == 4, answer
    down = await asyncio.to_thread(run, program, "down", at=elsewhere)
    assert down.code == 0, down.err
