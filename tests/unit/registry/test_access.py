"""Tenants and keys: what changes make of records, and who learns of them."""

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.registry.core.access import AT_A_TIME, Access, slot_of
from shared.errors import BadInput, Conflict, NotFound
from shared.ids import KeyId, ModelName, TenantId
from shared.messages.access import (
    AccessChange,
    AccessRecord,
    AddKey,
    KeyRecord,
    Limits,
    RemoveTenant,
    RevokeKey,
    RotateKey,
    ServiceTier,
    SetTenant,
    TenantRecord,
)

ACME, K1 = TenantId("acme"), KeyId("k1")
ONE, TWO = (hashlib.sha256(secret).digest() for secret in (b"1", b"2"))
DAY_NS = 86_400 * 10**9


def new(tenant: str = ACME, **fields: Any) -> SetTenant:
    return SetTenant(id=TenantId(tenant), new=True, **fields)


def key(name: str = K1, tenant: str = ACME, **fields: Any) -> AddKey:
    return AddKey(id=KeyId(name), tenant=TenantId(tenant), digest=ONE, **fields)


class Kept:
    """Access, with a store whose revisions count up."""

    def __init__(self) -> None:
        self.access = Access()
        self.stored: dict[str, tuple[AccessRecord, int]] = {}
        self.revision = 0

    def change(self, change: AccessChange, wall_ns: int = 1) -> AccessRecord:
        record = self.access.changed(change, wall_ns)
        self.revision += 1
        self.access.put(record, self.revision)
        self.stored[slot_of(record)] = record, self.revision
        return record


def test_a_tenant_is_made_changed_and_removed() -> None:
    kept = Kept()
    made = kept.change(new(weight=2.0, requests_per_min=60), wall_ns=7)
    assert made == TenantRecord(
        id=ACME, weight=2.0, limits=Limits(requests_per_min=60), created_ns=7
    )
    changed = kept.change(SetTenant(id=ACME, new=False, tokens_per_min=9, weight=1.0), wall_ns=8)
    assert changed == TenantRecord(
        id=ACME, limits=Limits(requests_per_min=60, tokens_per_min=9), created_ns=7
    )
    assert kept.change(RemoveTenant(id=ACME)) == msgspec.structs.replace(changed, removed=True)
    with pytest.raises(NotFound, match="no tenant 'acme'"):
        kept.change(key())
    assert kept.change(new(), wall_ns=9) == TenantRecord(id=ACME, created_ns=9)


def test_the_default_tenant_needs_not_be_added() -> None:
    kept = Kept()
    kept.change(key(tenant="default"))
    kept.change(SetTenant(id=TenantId("default"), new=False, weight=3.0))


def test_a_key_is_added_rotated_and_revoked() -> None:
    kept = Kept()
    kept.change(new())
    added = kept.change(key(lasts_s=86_400.0), wall_ns=5)
    assert isinstance(added, KeyRecord)
    assert (added.created_ns, added.expires_ns) == (5, 5 + DAY_NS)
    rotated = kept.change(RotateKey(id=K1, digest=TWO, grace_s=3.0), wall_ns=10)
    assert isinstance(rotated, KeyRecord)
    assert (rotated.digest, rotated.digest_before) == (TWO, ONE)
    assert rotated.before_until_ns == 10 + 3 * 10**9
    with pytest.raises(Conflict, match=r"1 keys .*revoke"):
        kept.change(RemoveTenant(id=ACME))
    revoked = kept.change(RevokeKey(id=K1), wall_ns=20)
    assert kept.change(RevokeKey(id=K1), wall_ns=30) == revoked
    with pytest.raises(Conflict, match="is revoked"):
        kept.change(RotateKey(id=K1, digest=ONE, grace_s=0.0))
    kept.change(RemoveTenant(id=ACME))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (new("a.b"), BadInput, "the tenant's id"),
        (new("other", weight=0.0), BadInput, "weight"),
        (new("other", weight=float("nan")), BadInput, "weight"),
        (new("other", tiers=()), BadInput, "service tier"),
        (new("other", concurrency=-1), BadInput, "concurrency"),
        (new("other", models=(ModelName("a b"),)), BadInput, "model name"),
        (new(), Conflict, "tenant set"),
        (SetTenant(id=TenantId("other"), new=False), NotFound, "tenant add"),
        (RemoveTenant(id=TenantId("other")), NotFound, "there are: acme"),
        (key("k2", "other"), NotFound, "tenant add"),
        (key("a-b"), BadInput, "has no '-'"),
        (key("a*b"), BadInput, "key's id"),
        (key(), Conflict, "there is a key k1"),
        (key("k2", lasts_s=-1.0), BadInput, "a time"),
        (key("k2", lasts_s=float("inf")), BadInput, "a time"),
        (key("k2", limits=Limits(tokens_per_min=-5)), BadInput, "tokens_per_min"),
        (AddKey(id=KeyId("k2"), tenant=ACME, digest=b"short"), BadInput, "32 bytes"),
        (RotateKey(id=K1, digest=b"", grace_s=0.0), BadInput, "32 bytes"),
        (RotateKey(id=K1, digest=TWO, grace_s=float("nan")), BadInput, "a time"),
        (RotateKey(id=KeyId("k2"), digest=TWO, grace_s=0.0), NotFound, "key ls"),
        (RevokeKey(id=KeyId("k2")), NotFound, "key ls"),
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    change: AccessChange, error: type[Exception], text: str
) -> None:
    kept = Kept()
    kept.change(new())
    kept.change(key())
    before = kept.access.page(0)
    with pytest.raises(error, match=text):
        kept.change(change)
    assert kept.access.page(0) == before


def test_tiers_are_named_once() -> None:
    made = Kept().change(new(tiers=(ServiceTier.FLEX, ServiceTier.FLEX)))
    assert isinstance(made, TenantRecord)
    assert made.tiers == (ServiceTier.FLEX,)


def follow(access: Access, since: int, known: dict[str, AccessRecord]) -> int:
    """Asks until nothing more has changed, as gateways do."""
    while True:
        page = access.page(since)
        slots = [slot_of(record) for record in page.records]
        assert len(slots) == len(set(slots)) <= AT_A_TIME
        known |= {slot_of(record): record for record in page.records}
        since = page.revision
        if not page.more:
            return since


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=60))
def test_whoever_asks_now_and_then_knows_all_that_is_stored(
    steps: list[tuple[int, bool, bool]],
) -> None:
    """Also after another registry has taken over, which knows what was stored."""
    kept = Kept()
    known: dict[str, AccessRecord] = {}
    since = 0
    for number, asks, falls in steps:
        tenant = TenantId(f"t{number}")
        kept.change(
            SetTenant(id=tenant, new=slot_of(TenantRecord(id=tenant)) not in kept.stored,
                      weight=kept.revision + 1.0)
        )  # fmt: skip
        if asks:
            since = follow(kept.access, since, known)
        if falls:
            kept.access = Access()
            kept.access.restore(kept.stored.values())
    follow(kept.access, since, known)
    assert known == {slot: record for slot, (record, _) in kept.stored.items()}


def test_many_records_come_in_parts() -> None:
    kept = Kept()
    for number in range(2 * AT_A_TIME + 1):
        kept.change(new(f"t{number}"))
    first = kept.access.page(0)
    assert (len(first.records), first.more) == (AT_A_TIME, True)
    known: dict[str, AccessRecord] = {}
    assert follow(kept.access, 0, known) == kept.revision
    assert len(known) == 2 * AT_A_TIME + 1


def test_what_was_replaced_often_is_forgotten() -> None:
    kept = Kept()
    kept.change(new())
    for _ in range(5 * AT_A_TIME):
        kept.change(SetTenant(id=ACME, new=False, weight=1.0))
    assert len(kept.access._by_revision) <= AT_A_TIME + 3


def test_a_registry_that_lost_all_says_so() -> None:
    assert Access().page(5).revision == 0
