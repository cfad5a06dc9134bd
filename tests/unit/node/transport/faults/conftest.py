"""A node with a region, for peers to misbehave with."""

import pytest

from tests.support.raw_peer import Node


@pytest.fixture(autouse=True)
def over_both(relay: str) -> str:
    """Whatever moves the bytes has to bear with such peers."""
    return relay


@pytest.fixture
async def node(node: Node) -> Node:
    node.transport.register("good", memoryview(bytearray(b"good")), ready=4)
    node.transport.register("w", memoryview(bytearray(b"x" * 1000)), ready=1000)
    return node
