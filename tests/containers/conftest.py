"""The engine that the tests here run containers with, where it is asked for and can be had."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.engine import Engine
from tests.support.packages import Unavailable

ASKED_FOR = "LS_CONTAINERS"
HOW = f"takes minutes, root and 5 GB: {ASKED_FOR}=1 ./lambdascale test tests/containers"


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Prepared, not started; what it downloads and builds is kept for the next time."""
    if not os.environ.get(ASKED_FOR):
        pytest.skip(HOW)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = Engine(base / "lambdascale" / "containers")
    try:
        found.prepare()
        yield found
    except Unavailable as error:
        pytest.skip(f"no container engine: {error}")
    finally:
        found.stop()
