"""Tenants and API keys: what a change makes of a record, and what has changed since when.

Each record has the revision at which the durable store took it. Revisions count all writes, so
whoever knows everything up to one asks for what is above it. Records are never deleted: a tenant
that was removed and a key that was revoked say so.
"""

from bisect import bisect_right
from collections.abc import Iterable
from math import inf

import msgspec

from shared.errors import BadInput, Conflict, NotFound
from shared.ids import KeyId, TenantId, check_model_name, check_name
from shared.messages.access import (
    DEFAULT_TENANT,
    AccessChange,
    AccessPage,
    AccessRecord,
    AddKey,
    KeyRecord,
    Limits,
    RemoveTenant,
    RevokeKey,
    RotateKey,
    SetTenant,
    TenantRecord,
)

DIGEST_BYTES = 32
MOST_WEIGHT = 1000.0
MOST_LIMIT = 1 << 40
LONGEST_S = 100 * 365 * 86400.0
MOST_MODELS = 1000
MOST_RECORDS = 100_000
AT_A_TIME = 1000
"""Records in an answer: 200 kB, or a few MB if each names many models."""
AT_A_TIME_BYTES = 1 << 20


class Access:
    def __init__(self) -> None:
        self._tenants: dict[TenantId, TenantRecord] = {}
        self._keys: dict[KeyId, KeyRecord] = {}
        self._by_revision: list[tuple[int, str]] = []
        """(revision, slot) of every record, in order; also of those that a later one replaced."""
        self._slots: dict[str, tuple[int, AccessRecord]] = {}

    def restore(self, found: Iterable[tuple[AccessRecord, int]]) -> None:
        """Takes stored records with their revisions."""
        for record, revision in sorted(found, key=lambda pair: pair[1]):
            self.put(record, revision)

    def put(self, record: AccessRecord, revision: int) -> None:
        """Takes a record that the store has taken at this revision, above all before."""
        slot = slot_of(record)
        self._slots[slot] = revision, record
        self._by_revision.append((revision, slot))
        if len(self._by_revision) > 2 * len(self._slots) + AT_A_TIME:
            self._by_revision = sorted((at, slot) for slot, (at, _) in self._slots.items())
        if isinstance(record, TenantRecord):
            self._tenants[record.id] = record
        else:
            self._keys[record.id] = record

    def page(self, since: int) -> AccessPage:
        """What has changed above this revision: as much as one answer holds."""
        last = self._by_revision[-1][0] if self._by_revision else 0
        if last < since:
            return AccessPage(records=(), revision=last)
        records: list[AccessRecord] = []
        room = AT_A_TIME_BYTES
        for at, slot in self._by_revision[bisect_right(self._by_revision, (since, "\uffff")) :]:
            newest, record = self._slots[slot]
            if newest != at:
                continue
            if len(records) == AT_A_TIME or room <= 0:
                return AccessPage(records=tuple(records), revision=since, more=True)
            records.append(record)
            room -= 300 + sum(map(len, record.models))
            since = at
        return AccessPage(records=tuple(records), revision=last)

    def changed(self, change: AccessChange, wall_ns: int) -> AccessRecord:
        """The record after the change. Changes nothing. BadInput, NotFound or Conflict."""
        match change:
            case SetTenant():
                record: AccessRecord = self._set(change, wall_ns)
            case RemoveTenant(id=id):
                record = self._removed(id)
            case AddKey():
                record = self._added(change, wall_ns)
            case RotateKey():
                record = self._rotated(change, wall_ns)
            case RevokeKey(id=id):
                known = self._key(id)
                revoked_ns = known.revoked_ns or wall_ns
                record = msgspec.structs.replace(known, revoked_ns=revoked_ns)
        if slot_of(record) not in self._slots and len(self._slots) >= MOST_RECORDS:
            raise BadInput(f"there are {MOST_RECORDS} tenants and keys already, which is the most")
        return record

    # --- tenants -------------------------------------------------------------

    def _set(self, change: SetTenant, wall_ns: int) -> TenantRecord:
        known = self._tenants.get(check_tenant(change.id))
        there = known is not None and not known.removed
        if change.new and there:
            raise Conflict(f"there is a tenant {change.id} already: `tenant set` changes it")
        if not change.new and not there and change.id != DEFAULT_TENANT:
            raise self._no_tenant(change.id)
        if known is None or known.removed:
            known = TenantRecord(id=change.id, created_ns=wall_ns)
        limits = _limits(known.limits, change)
        tenant = msgspec.structs.replace(
            known,
            weight=known.weight if change.weight is None else change.weight,
            tiers=known.tiers if change.tiers is None else tuple(dict.fromkeys(change.tiers)),
            models=known.models if change.models is None else tuple(dict.fromkeys(change.models)),
            limits=limits,
        )
        if not 0 < tenant.weight <= MOST_WEIGHT:
            raise BadInput(f"a weight is above 0 and {MOST_WEIGHT:g} at most, not {tenant.weight}")
        if not tenant.tiers:
            raise BadInput(f"tenant {tenant.id} must be allowed at least one service tier")
        _check_limits(tenant.limits)
        _check_models(tenant.models)
        return tenant

    def _removed(self, tenant: TenantId) -> TenantRecord:
        known = self._tenant(tenant)
        keys = [key.id for key in self._keys.values() if key.tenant == tenant if not key.revoked_ns]
        if keys:
            some = ", ".join(sorted(keys)[:3]) + (", ..." if len(keys) > 3 else "")
            raise Conflict(
                f"tenant {tenant} has {len(keys)} keys ({some}): `lambdascale key revoke` them "
                "first"
            )
        return msgspec.structs.replace(known, removed=True)

    def _tenant(self, tenant: TenantId) -> TenantRecord:
        known = self._tenants.get(tenant)
        if known is None or known.removed:
            raise self._no_tenant(tenant)
        return known

    def _no_tenant(self, tenant: TenantId) -> NotFound:
        there = sorted(t.id for t in self._tenants.values() if not t.removed)
        return NotFound(
            f"there is no tenant {tenant!r} (there are: {', '.join(there[:20]) or 'none'}); "
            "`lambdascale tenant add` makes one"
        )

    # --- keys ----------------------------------------------------------------

    def _added(self, change: AddKey, wall_ns: int) -> KeyRecord:
        if change.tenant != DEFAULT_TENANT:
            self._tenant(change.tenant)
        check_name("a key's id", change.id)
        if "-" in change.id:
            raise BadInput(f"a key's id has no '-': {change.id}")
        if change.id in self._keys:
            raise Conflict(f"there is a key {change.id} already")
        _check_digest(change.digest)
        _check_limits(change.limits)
        _check_models(change.models)
        return KeyRecord(
            id=change.id,
            tenant=change.tenant,
            digest=change.digest,
            role=change.role,
            limits=change.limits,
            models=tuple(dict.fromkeys(change.models)),
            created_ns=wall_ns,
            expires_ns=_after(wall_ns, change.lasts_s) if change.lasts_s else 0,
        )

    def _rotated(self, change: RotateKey, wall_ns: int) -> KeyRecord:
        known = self._key(change.id)
        if known.revoked_ns:
            raise Conflict(f"key {change.id} is revoked: add another")
        _check_digest(change.digest)
        return msgspec.structs.replace(
            known,
            digest=change.digest,
            digest_before=known.digest,
            before_until_ns=_after(wall_ns, change.grace_s),
        )

    def _key(self, key: KeyId) -> KeyRecord:
        known = self._keys.get(key)
        if known is None:
            raise NotFound(f"there is no key {key!r}; `lambdascale key ls` lists all")
        return known


def slot_of(record: AccessRecord) -> str:
    """The record's key in the durable store."""
    return f"{'tenant' if isinstance(record, TenantRecord) else 'key'}.{record.id}"


def check_tenant(tenant: str) -> TenantId:
    return TenantId(check_name("the tenant's id", tenant))


def _limits(known: Limits, change: SetTenant) -> Limits:
    wanted = {field: getattr(change, field) for field in Limits.__struct_fields__}
    given = {field: value for field, value in wanted.items() if value is not None}
    return msgspec.structs.replace(known, **given)


def _check_limits(limits: Limits) -> None:
    for field in Limits.__struct_fields__:
        if not 0 <= getattr(limits, field) <= MOST_LIMIT:
            raise BadInput(f"{field} must be 0 (no limit) or more, not {getattr(limits, field)}")


def _check_models(models: tuple[str, ...]) -> None:
    if len(models) > MOST_MODELS:
        raise BadInput(f"{len(models)} models are too many to name: {MOST_MODELS} at most")
    for model in models:
        check_model_name(model)


def _check_digest(digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise BadInput(f"the digest of a secret has {DIGEST_BYTES} bytes, not {len(digest)}")


def _after(wall_ns: int, seconds: float) -> int:
    if not 0 <= seconds <= LONGEST_S or seconds == inf:
        raise BadInput(f"a time must be 0 to {LONGEST_S:.0f} seconds, not {seconds}")
    return wall_ns + round(seconds * 1e9)
