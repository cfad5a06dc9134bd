"""Who asks, and what that permits: what a request carries from the check of its key on."""

from dataclasses import dataclass

from shared.ids import KeyId, ModelName, TenantId
from shared.messages.access import Limits, ServiceTier, TenantRecord


@dataclass(frozen=True, slots=True)
class Account:
    """Where use is counted: a tenant, or a key."""

    name: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Caller:
    tenant: TenantId
    key: KeyId
    """Empty: no key of a tenant's."""
    weight: float
    """See TenantRecord."""
    tiers: tuple[ServiceTier, ...]
    models: frozenset[ModelName] | None
    """The models that it may use; None: all."""
    accounts: tuple[Account, ...]
    """Where its use counts and has limits."""
    admin: bool = False
    """Whether it may look at the cluster."""

    def may_use(self, model: ModelName) -> bool:
        return self.models is None or model in self.models


def caller_of(
    tenant: TenantRecord,
    key: KeyId,
    models: tuple[ModelName, ...],
    limits: Limits,
    *,
    free: bool = False,
    admin: bool = False,
) -> Caller:
    """Whoever has this key of the tenant. `models`, `limits`: the key's own. `free`: no limit
    counts, and every model and tier may be used. `admin`: it may look at the cluster."""
    allowed = [frozenset(names) for names in (tenant.models, models) if names]
    accounts = (Account(f"tenant {tenant.id}", tenant.limits), Account(f"key {key}", limits))
    return Caller(
        tenant=tenant.id,
        key=key,
        weight=tenant.weight,
        tiers=tuple(ServiceTier) if free else tenant.tiers,
        models=None if free or not allowed else frozenset.intersection(*allowed),
        accounts=() if free else tuple(one for one in accounts if one.limits != Limits()),
        admin=admin,
    )
