"""Tiny checkpoints for all tests of a node to read.

The tests of the node's core need none, nor torch: so what makes them is imported when it is used.
"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from services.local.demo_model import make_checkpoint
    from tests.support.models import TINY

    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, TINY)
    return path


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from services.local.demo_model import make_checkpoint
    from tests.support.models import WIDE

    path = tmp_path_factory.mktemp("wide")
    make_checkpoint(path, WIDE)
    return path
