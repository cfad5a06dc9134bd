"""Nodes that move blocks, closed at the end of a test."""

from collections.abc import AsyncIterator

import pytest

from tests.unit.node.moving.movers import Nodes


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    nodes = Nodes()
    yield nodes
    for stack in list(nodes.running.values()):
        await stack.aclose()
