"""What callers use: each call is charged when it is let in, and settled when it ends, at this
gateway and, by what gateways tell each other, at all of them."""

from collections.abc import Callable, Sequence

from services.gateway.api_error import ApiError
from services.gateway.core.callers import Caller
from services.gateway.core.fair_queue import Share
from services.gateway.core.quotas import Charge, Quotas, Standing
from services.gateway.core.requests import Request
from services.gateway.usage_log import UsageLog
from shared import subjects
from shared.bus.base import Bus, On, Subscription
from shared.clock import now, wall_ns
from shared.ids import GatewayId
from shared.messages.access import ServiceTier
from shared.messages.pool import ModelRecord
from shared.messages.quotas import GatewayUse
from shared.usage import CallUsage

_RANKS = {tier: rank for rank, tier in enumerate(ServiceTier)}
TELL_S = 0.05
"""Seconds between reports while use changes."""
WHOLE = 20
"""Every so many of them is whole."""


class Books:
    def __init__(
        self,
        bus: Bus,
        usage: UsageLog,
        own: Callable[[], GatewayId],
        kv_bytes: Callable[[ModelRecord], int],
    ) -> None:
        """`own`: this gateway's id, now. `kv_bytes`: of a token's KV; 0: not known."""
        self.usage = usage
        self.kv_bytes = kv_bytes
        self._bus = bus
        self._own = own
        self.quotas = Quotas()
        self._told = 0

    async def open(self) -> Subscription:
        """Begins to hear what other gateways say."""
        return await self._bus.subscribe(subjects.LOAD_TENANTS, On(GatewayUse, self._hear))

    def headers(self, caller: Caller) -> dict[str, str]:
        """OpenAI's headers: what the caller may use now."""
        accounts, at = caller.accounts, now()
        if not accounts:
            return {}
        found = {
            "requests": self.quotas.requests(accounts, at),
            "tokens": self.quotas.tokens(accounts, at),
        }
        return {
            name: value
            for kind, standing in found.items()
            if standing is not None
            for name, value in _headers(kind, standing)
        }

    async def tell(self) -> float:
        """Tells other gateways what is used here. Returns the seconds until the next time."""
        self._told += 1
        whole = self._told % WHOLE == 0
        self.quotas.tick(now())
        if accounts := self.quotas.report(whole=whole):
            message = GatewayUse(gateway=self._own(), accounts=accounts, whole=whole)
            await self._bus.publish(subjects.LOAD_TENANTS, message)
        return TELL_S

    async def _hear(self, message: GatewayUse) -> None:
        if message.gateway != self._own():
            self.quotas.hear(message.gateway, message.accounts, now(), whole=message.whole)


class Tab:
    """What one call is charged."""

    def __init__(
        self, books: Books, caller: Caller, tier: ServiceTier = ServiceTier.DEFAULT
    ) -> None:
        """ApiError 403 if the caller may not ask for the tier."""
        if tier not in caller.tiers:
            may = ", ".join(one.value for one in caller.tiers)
            message = f"service_tier: tenant {caller.tenant} may not ask for {tier.value!r} ({may})"
            raise ApiError(403, message, param="service_tier", code="service_tier_not_allowed")
        self.share = Share(caller.tenant, caller.weight, _RANKS[tier])
        """What its requests wait as."""
        self.caller = caller
        self._books = books
        self._charge: Charge | None = None

    def let_in(self, sequences: int, tokens: int) -> None:
        """Charges so many completions, which use at most so many tokens. QuotaExceeded or
        BadInput."""
        accounts = self.caller.accounts
        self._charge = self._books.quotas.admit(accounts, sequences, tokens, now())

    def close(
        self,
        model: ModelRecord,
        requests: Sequence[Request],
        *,
        cost: int,
        prompt: int,
        cached: int,
        generated: int,
        status: str,
        ttft_s: float = 0.0,
        tpot_s: float = 0.0,
        queue_s: float = 0.0,
    ) -> None:
        """The call has ended: it gets back what it did not use, and is written down. `cost`: in
        tokens, as it was let in. `status` and the times: see CallUsage."""
        charge, self._charge = self._charge, None
        if charge is None:
            return
        self._books.quotas.settle(charge, cost, now())
        kv_bytes = self._books.kv_bytes(model) * sum(request.kv_token_s for request in requests)
        self._books.usage.note(
            CallUsage(
                tenant=self.caller.tenant,
                key=self.caller.key,
                model=model.name,
                call=requests[0].call,
                ended_ns=wall_ns(),
                took_s=round(now() - charge.at, 3),
                prompt=prompt,
                cached=cached,
                generated=generated,
                device_s=round(sum(request.device_s for request in requests), 4),
                kv_gb_s=round(kv_bytes / 1e9, 12),
                ttft_s=round(ttft_s, 4),
                tpot_s=round(tpot_s, 5),
                queue_s=round(queue_s, 4),
                status=status,
            )
        )

    def take_back(self) -> None:
        """Nothing came of the call."""
        charge, self._charge = self._charge, None
        if charge is not None:
            self._books.quotas.take_back(charge, now())


def _headers(kind: str, standing: Standing) -> list[tuple[str, str]]:
    return [
        (f"x-ratelimit-limit-{kind}", str(standing.limit)),
        (f"x-ratelimit-remaining-{kind}", str(standing.left)),
        (f"x-ratelimit-reset-{kind}", _duration(standing.full_s)),
    ]


def _duration(seconds: float) -> str:
    """In the API's notation: 850ms, 4.2s, 1m30.1s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
