"""Percentiles of calls by model and tenant, of a window of time, bounded."""

from typing import Any

import pytest

from services.gateway.core import latencies
from services.gateway.core.latencies import Latencies, percentiles
from shared.ids import KeyId, ModelName, TenantId
from shared.usage import CallUsage


def call(ended_ns: int, *, tenant: str = "acme", ttft_s: float = 0.0, **more: Any) -> CallUsage:
    return CallUsage(
        tenant=TenantId(tenant), key=KeyId("k"), model=ModelName("m"), call="c", ended_ns=ended_ns,
        took_s=1.0, ttft_s=ttft_s, **more,
    )  # fmt: skip


def test_nearest_ranks() -> None:
    assert percentiles([]) == ()
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles(range(1, 101)) == (50, 90, 99)


def test_calls_are_summed_by_tenant_and_old_ones_left_out() -> None:
    known = Latencies()
    known.note(call(1, ttft_s=9.0))
    for number in range(1, 5):
        known.note(call(10, ttft_s=float(number), tpot_s=0.5, queue_s=0.25, device_s=1.5))
    known.note(call(11, tenant="other"))
    acme, other = known.since(10)
    assert (acme.tenant, acme.calls, acme.ttft_s) == ("acme", 4, (2.0, 4.0, 4.0))
    assert (acme.tpot_s[0], acme.queue_s[0], acme.device_s) == (0.5, 0.25, 6.0)
    assert (other.calls, other.ttft_s, other.tpot_s) == (1, (), ())


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latencies, "MOST", 2)
    known = Latencies()
    for number in range(5):
        known.note(call(number))
    assert [one.calls for one in known.since(0)] == [2]
