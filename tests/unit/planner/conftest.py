from collections.abc import AsyncIterator

import pytest

from tests.unit.planner.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """To be used in virtual time: the planner's patience is what it is."""
    async with Cluster() as cluster:
        yield cluster
