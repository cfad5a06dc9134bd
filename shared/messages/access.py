"""Who may use the cluster: tenants, and the API keys of each.

The registry keeps them. Operators change them through it. Gateways ask it several times a second
what has changed since the last time. So a change counts everywhere within a second, and a gateway
that has missed some learns them with the next answer.
"""

import enum

import msgspec

from shared.ids import KeyId, ModelName, TenantId
from shared.messages.base import Message

DEFAULT_TENANT = TenantId("default")
"""The tenant of whoever needs no key, or has one from a gateway's configuration."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be used. 0: there is no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    """Tokens of prompts and generated ones."""
    concurrency: int = 0
    """Completions at a time: a call with n=4 is four."""


class ServiceTier(enum.Enum):
    """How urgent a request is. A later tier is served when nothing of an earlier one waits."""

    PRIORITY = "priority"
    DEFAULT = "default"
    FLEX = "flex"


class KeyRole(enum.Enum):
    USER = "user"
    ADMIN = "admin"
    """An operator's own: it reaches every model, and no limit counts for it."""


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tenant"):
    id: TenantId
    weight: float = 1.0
    """Its share of a model's instances, beside other tenants that wait for it too."""
    tiers: tuple[ServiceTier, ...] = (ServiceTier.DEFAULT, ServiceTier.FLEX)
    limits: Limits = Limits()
    models: tuple[ModelName, ...] = ()
    """Empty: every model."""
    created_ns: int = 0
    removed: bool = False
    """Whether it is there no longer. The record stays, so that gateways hear of it."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="key"):
    """An API key: `ls-ID-SECRET`. The secret itself is nowhere kept."""

    id: KeyId
    tenant: TenantId
    digest: bytes
    """SHA-256 of the secret, which has 256 random bits."""
    role: KeyRole = KeyRole.USER
    limits: Limits = Limits()
    """They count beside the tenant's."""
    models: tuple[ModelName, ...] = ()
    """Empty: every model that the tenant may use."""
    created_ns: int = 0
    expires_ns: int = 0
    """0: never."""
    revoked_ns: int = 0
    """When it was revoked; 0: it was not."""
    digest_before: bytes = b""
    """Of the secret before the last rotation, which counts until `before_until_ns`."""
    before_until_ns: int = 0


AccessRecord = TenantRecord | KeyRecord


class SetTenant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="set_tenant"):
    """None: as it is."""

    id: TenantId
    new: bool
    """Whether the tenant is to be made. Otherwise it must be there, or be `default`."""
    weight: float | None = None
    tiers: tuple[ServiceTier, ...] | None = None
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None
    models: tuple[ModelName, ...] | None = None


class RemoveTenant(msgspec.Struct, frozen=True, kw_only=True, tag="remove_tenant"):
    id: TenantId


class AddKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add_key"):
    id: KeyId
    tenant: TenantId
    digest: bytes
    role: KeyRole = KeyRole.USER
    limits: Limits = Limits()
    models: tuple[ModelName, ...] = ()
    lasts_s: float = 0.0
    """0: for ever."""


class RotateKey(msgspec.Struct, frozen=True, kw_only=True, tag="rotate_key"):
    id: KeyId
    digest: bytes
    """Of the new secret."""
    grace_s: float
    """How long the secret before counts beside it."""


class RevokeKey(msgspec.Struct, frozen=True, kw_only=True, tag="revoke_key"):
    id: KeyId


AccessChange = SetTenant | RemoveTenant | AddKey | RotateKey | RevokeKey


class ChangeAccess(Message, frozen=True, kw_only=True, tag="change_access"):
    """Operator -> registry. Answered with AccessPage, whose record is the changed one, once it is
    durable. BadInput, NotFound or Conflict, and nothing was changed; after BusTimeout it may have
    been."""

    change: AccessChange


class AccessQuery(Message, frozen=True, kw_only=True, tag="access_query"):
    """Gateway or operator -> registry. Answered with AccessPage."""

    since: int = 0
    """The revision up to which everything is known."""


class AccessPage(Message, frozen=True, kw_only=True, tag="access_page"):
    records: tuple[AccessRecord, ...]
    """The oldest of those that have changed since, in the order of their changes."""
    revision: int
    """Of the last of them; the asker's own if there are none. Lower than the asker's: the registry
    lost what it had, and the asker has to begin anew."""
    more: bool = False
    """Whether there are others."""
