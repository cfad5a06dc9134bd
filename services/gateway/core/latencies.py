"""How long calls took lately at this gateway, by model and tenant.

It keeps at most MOST calls of about 300 bytes: 6 MB.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from math import ceil

import msgspec

from shared.ids import ModelName, TenantId
from shared.usage import CallUsage

MOST = 20_000
SHARES = (0.5, 0.9, 0.99)


class Lately(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles are those of SHARES, in seconds, by nearest rank; empty: no call has such a
    time."""

    model: ModelName
    tenant: TenantId
    calls: int
    failed: int
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    queue_s: tuple[float, ...]
    generated: int
    """Tokens."""
    device_s: float


class Latencies:
    def __init__(self) -> None:
        self._calls: deque[CallUsage] = deque(maxlen=MOST)

    def note(self, call: CallUsage) -> None:
        self._calls.append(call)

    def since(self, at_ns: int) -> list[Lately]:
        """What ended since."""
        groups: dict[tuple[ModelName, TenantId], list[CallUsage]] = {}
        for call in takewhile(lambda call: call.ended_ns >= at_ns, reversed(self._calls)):
            groups.setdefault((call.model, call.tenant), []).append(call)
        return [_summed(*who, calls) for who, calls in sorted(groups.items())]


def _summed(model: ModelName, tenant: TenantId, calls: Sequence[CallUsage]) -> Lately:
    begun = [call for call in calls if call.ttft_s]
    return Lately(
        model=model,
        tenant=tenant,
        calls=len(calls),
        failed=sum(call.status not in ("done", "cancelled") for call in calls),
        ttft_s=percentiles(call.ttft_s for call in begun),
        tpot_s=percentiles(call.tpot_s for call in begun if call.tpot_s),
        queue_s=percentiles(call.queue_s for call in begun),
        generated=sum(call.generated for call in calls),
        device_s=round(sum(call.device_s for call in calls), 3),
    )


def percentiles(values: Iterable[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    if not ordered:
        return ()
    return tuple(ordered[max(0, ceil(share * len(ordered)) - 1)] for share in SHARES)
