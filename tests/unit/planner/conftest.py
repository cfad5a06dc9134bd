from collections.abc import AsyncIterator

import pytest

from services.planner import context, event_run, model, serving, trust
from tests.unit.planner.cluster import Cluster


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """With the planner's patience cut short."""
    monkeypatch.setattr(serving, "SETTLE_S", 0.08)
    monkeypatch.setattr(serving, "REPUBLISH_S", 0.05)
    monkeypatch.setattr(model, "RETRY_S", 0.05)
    monkeypatch.setattr(model, "AVOID_S", 0.2)
    monkeypatch.setattr(context, "PING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(event_run, "CHECK_S", 0.1)
    monkeypatch.setattr(trust, "LOOK_S", 0.1)
    monkeypatch.setattr(event_run, "STALL_S", 0.3)
    async with Cluster() as cluster:
        yield cluster
