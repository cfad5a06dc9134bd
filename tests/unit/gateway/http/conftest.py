"""A gateway with HTTP, in front of nodes that generate known text."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.unit.gateway.http.described import Described
from tests.unit.gateway.support import Cluster, replica, running


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running(replica(1)) as cluster:
        yield cluster


@pytest.fixture
async def described(cluster: Cluster) -> Described:
    return await Described.at(cluster.service.url)


@pytest.fixture
async def http(cluster: Cluster, described: Described) -> AsyncIterator[aiohttp.ClientSession]:
    """Whatever it is answered must be as the OpenAPI document says."""
    tracing = [described.tracing()]
    async with aiohttp.ClientSession(cluster.service.url, trace_configs=tracing) as session:
        yield session
