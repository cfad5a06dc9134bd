"""RDMA where there is none. What it does with a device: tests/rdma."""

import sys

import pytest

from services.node import transport
from services.node.transport.rdma import RdmaDirect
from shared.errors import ConfigError


async def test_no_such_device_here() -> None:
    with pytest.raises(ConfigError, match="nope0"):
        async with RdmaDirect([], "nope0", 0):
            pass


async def test_pyverbs_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transport, "verbs", raising=False)
    monkeypatch.setitem(sys.modules, f"{transport.__name__}.verbs", None)
    with pytest.raises(ConfigError, match="apt install python3-pyverbs"):
        async with RdmaDirect([], "mlx5_0", 3):
            pass
