"""The package that others install: what is in it runs without the source tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shared.version import __version__
from tests.unit.deploy.support import MODULE, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages with the wheel's content."""
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(directory)]
    built = subprocess.run(
        [*build, *options, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.iterdir()
    assert wheel.name == f"lambdascale-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run(site: Path, *words: str) -> str:
    process = subprocess.run(
        [sys.executable, *words],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_it_says_its_version(site: Path) -> None:
    assert run(site, *MODULE, "--version").strip() == __version__


def test_benchmarks_are_part_of_it(site: Path) -> None:
    assert "multicast" in run(site, *MODULE, "bench", "--help")
    found = run(site, "-c", "from benchmarks.pipeline import bench; print(bench.__file__)")
    assert found.strip() == str(site / "benchmarks" / "pipeline" / "bench.py")


def test_the_simulations_data_is_part_of_it(site: Path) -> None:
    assert "h800-400g" in run(site, *MODULE, "simulate", "--help")


def test_tests_are_no_part_of_it(site: Path) -> None:
    packages = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert packages == {"services", "shared", "simulation", "benchmarks"}
