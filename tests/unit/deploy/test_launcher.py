"""./lambdascale and the directory that LS_VENV names: nothing but its own is ever erased."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.support import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of the launcher alone, with what it installs."""
    made = tmp_path / "checkout"
    (made / "requirements").mkdir(parents=True)
    for name in ("lambdascale", "requirements/run.lock", "requirements/torch.lock"):
        shutil.copy(ROOT / name, made / name)
    return made


def launch(checkout: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    """Without an index, so that it can install nothing."""
    environment = {
        **os.environ,
        "LS_VENV": str(venv),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
    }
    environment.pop("PIP_FIND_LINKS", None)
    command = [str(checkout / "lambdascale"), "--version"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kept", ["notes.txt", "pyvenv.cfg", ".hidden"])
def test_a_directory_with_something_else_in_it_is_left_alone(
    checkout: Path, tmp_path: Path, kept: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / kept).write_text("years of work")
    refused = launch(checkout, home)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"lambdascale: {home} holds something else than an env")
    assert "LS_VENV" in refused.stderr
    assert [path.name for path in home.iterdir()] == [kept]
    assert (home / kept).read_text() == "years of work"


def test_the_environment_of_another_checkout_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "bin").mkdir(parents=True)
    (theirs / ".lambdascale").write_text("/srv/other\n")
    refused = launch(checkout, theirs)
    assert refused.returncode == 1
    assert "is the environment of another checkout, /srv/other:" in refused.stderr
    assert (theirs / "bin").is_dir()


def test_a_file_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    refused = launch(checkout, file)
    assert refused.returncode == 1
    assert f"{file} is not a directory" in refused.stderr
    assert file.read_text() == "text"


def test_an_environment_that_was_never_finished_is_made_anew(
    checkout: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    (venv / "half").mkdir(parents=True)
    (venv / ".lambdascale").write_text(f"{checkout}\n")
    failed = launch(checkout, venv)
    assert failed.returncode == 1
    assert "making the virtual environment" in failed.stderr
    assert "No matching distribution found for torch" in failed.stderr  # pip's own words
    assert failed.stderr.splitlines()[-1].startswith("lambdascale: installing --no-deps")
    assert not (venv / "half").exists()
    assert (venv / ".lambdascale").read_text() == f"{checkout}\n"
