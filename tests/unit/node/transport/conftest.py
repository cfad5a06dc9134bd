"""A node's real end of the data plane, for peers made by hand to talk to."""

from collections.abc import AsyncIterator

import pytest

from tests.support.raw_peer import Node


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    async with node.transport:
        yield node
