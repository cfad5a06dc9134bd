"""One tiny checkpoint for all tests of the node's shell."""

from pathlib import Path

import pytest

from services.cli.demo_model import make_checkpoint
from tests.support.models import TINY


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, TINY)
    return path
