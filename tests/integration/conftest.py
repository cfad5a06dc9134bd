"""The tiny model that real clusters serve in tests, and what `transformers` makes of it."""

from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from tests.support.cluster import Oracle
from tests.support.models import TINY


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(path, TINY)
    return path


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)
