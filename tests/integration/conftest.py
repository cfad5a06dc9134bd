"""What several of these tests need: the tiny model that real clusters serve, and a NATS server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.local.demo_model import make_checkpoint
from services.local.nats_server import NatsServer
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


@pytest.fixture
async def restartable(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server that comes back at the same address with the same store."""
    directory = tmp_path / "nats"
    async with NatsServer(directory) as first:
        port = int(first.url.rsplit(":", 1)[1])
    async with NatsServer(directory, port=port) as server:
        yield server
