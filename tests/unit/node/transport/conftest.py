"""A node's real end of the data plane, for peers made by hand to talk to."""

from collections.abc import AsyncIterator

import pytest

from services.node.transport import native, sockets
from tests.support.raw_peer import Node


@pytest.fixture(params=["C", "Python"])
def relay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the bytes of reads over plain TCP."""
    if request.param == "Python":
        monkeypatch.setattr(native, "load", lambda: None)
    else:
        assert native.load() is not None
    return str(request.param)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    async with node.transport:
        yield node


@pytest.fixture
async def shallow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node whose frames are larger than what the kernel takes at once."""
    monkeypatch.setattr(sockets, "deep_buffers", lambda: False)
    async with (node := Node(rate=10_000_000_000)).transport:
        yield node
