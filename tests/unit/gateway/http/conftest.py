"""A gateway with HTTP, in front of nodes that generate known text."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.unit.gateway.support import Cluster, replica, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running(replica(1)) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.service.url) as session:
        yield session
