"""Tiny checkpoints for all tests of a node to read."""

from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from tests.support.models import TINY, WIDE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, TINY)
    return path


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    make_checkpoint(path, WIDE)
    return path
