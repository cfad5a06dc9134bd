import shutil
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from tests.support.models import TINY


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint for all to read."""
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, TINY)
    return path


@pytest.fixture
def own(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint to change."""
    return Path(shutil.copytree(tiny, tmp_path / "own"))
