"""Which keys count now, and who has them.

Keys and tenants come from the registry, and the digests of `gateway.api_keys` from the gateway's
configuration. Only while there is no key at all, neither here nor there, and never was, does the
gateway serve without one.
"""

import hashlib
from collections.abc import Sequence
from hmac import compare_digest

from services.gateway.api_error import ApiError
from services.gateway.core.callers import Caller, caller_of
from shared.errors import ConfigError
from shared.ids import KeyId, TenantId
from shared.messages.access import (
    DEFAULT_TENANT,
    AccessPage,
    KeyRecord,
    KeyRole,
    Limits,
    TenantRecord,
)

_NO_TENANT = TenantRecord(id=DEFAULT_TENANT)


class Keyring:
    def __init__(self, static: Sequence[str]) -> None:
        """`static`: SHA-256 (hex) of keys from the configuration. ConfigError."""
        for digest in static:
            if len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
                raise ConfigError(
                    "gateway.api_keys must be SHA-256 digests (64 hex digits), not keys themselves"
                )
        self.known = False
        """Whether the registry has said which keys there are."""
        self.revision = 0
        """Up to which its changes are known."""
        self._static = [bytes.fromhex(digest) for digest in static]
        self._tenants: dict[TenantId, TenantRecord] = {}
        self._keys: dict[KeyId, KeyRecord] = {}
        self._callers: dict[KeyId, Caller | None] = {}
        """What was made of tenant and key. Empty key: who has none of a tenant's."""

    def take(self, page: AccessPage) -> None:
        """Takes in what has changed."""
        if page.revision < self.revision:  # the registry lost it all
            self.revision = 0
            return
        self.revision = page.revision
        if page.records:
            self._callers.clear()
        for record in page.records:
            if isinstance(record, TenantRecord):
                self._tenants[record.id] = record
            else:
                self._keys[record.id] = record
        self.known = self.known or not page.more

    def caller(self, authorization: str, wall_ns: int) -> Caller:
        """Who sends this header. ApiError 401 if it must name a key and names none that counts; 503
        before it is known which keys there are."""
        scheme, _, given = authorization.partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else ""
        if key and self._is_static(key):
            return caller_of(self._default, KeyId(""), (), Limits(), free=True, admin=True)
        if not self.known:
            message = "the gateway is starting: the registry has not said yet which keys there are"
            raise ApiError(503, message, retry_after=1)
        if not self._static and not self._keys:
            return self._of(KeyId(""))
        if not key:
            raise _refused("You didn't provide an API key: send 'Authorization: Bearer KEY'")
        prefix, _, rest = key.partition("-")
        name, _, secret = rest.partition("-")
        record = self._keys.get(KeyId(name)) if prefix == "ls" else None
        if record is None or not _counts(record, secret, wall_ns):
            raise _refused("Incorrect API key provided: it is none of this cluster's")
        if record.revoked_ns:
            raise _refused(f"The API key ls-{name}-... was revoked")
        if record.expires_ns and wall_ns >= record.expires_ns:
            raise _refused(f"The API key ls-{name}-... has expired")
        return self._of(record.id)

    def _of(self, key: KeyId) -> Caller:
        if key not in self._callers:
            self._callers[key] = self._made(key)
        caller = self._callers[key]
        if caller is None:
            raise _refused(f"The tenant of the API key ls-{key}-... was removed")
        return caller

    def _made(self, key: KeyId) -> Caller | None:
        if not key:
            return caller_of(self._default, key, (), Limits(), admin=True)  # no key is asked for
        record = self._keys[key]
        if record.tenant == DEFAULT_TENANT:
            tenant: TenantRecord | None = self._default
        else:
            tenant = self._tenants.get(record.tenant)
        if tenant is None or tenant.removed:
            return None
        admin = record.role is KeyRole.ADMIN
        return caller_of(tenant, key, record.models, record.limits, free=admin, admin=admin)

    @property
    def _default(self) -> TenantRecord:
        found = self._tenants.get(DEFAULT_TENANT, _NO_TENANT)
        return _NO_TENANT if found.removed else found

    def _is_static(self, key: str) -> bool:
        digest = _digest(key)
        return max((compare_digest(digest, known) for known in self._static), default=False)


def _counts(record: KeyRecord, secret: str, wall_ns: int) -> bool:
    """Whether it is the key's secret, or the one before within its time."""
    digest = _digest(secret)
    now = compare_digest(digest, record.digest)
    before = compare_digest(digest, record.digest_before) and wall_ns < record.before_until_ns
    return now or before


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).digest()


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
