"""Which keys count, and for whom."""

import hashlib
from typing import Any

import msgspec
import pytest

from services.gateway.api_error import ApiError
from services.gateway.core.callers import Account, caller_of
from services.gateway.keyring import Keyring
from shared.errors import ConfigError
from shared.ids import KeyId, ModelName, TenantId
from shared.messages.access import (
    AccessPage,
    AccessRecord,
    KeyRecord,
    KeyRole,
    Limits,
    ServiceTier,
    TenantRecord,
)

A, B = ModelName("a"), ModelName("b")
ACME = TenantRecord(id=TenantId("acme"), weight=2.0, limits=Limits(requests_per_min=6))


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def key(**fields: Any) -> KeyRecord:
    return msgspec.structs.replace(
        KeyRecord(id=KeyId("k1"), tenant=ACME.id, digest=digest("s-1")), **fields
    )


def keyring(*records: AccessRecord, static: tuple[str, ...] = ()) -> Keyring:
    made = Keyring(static)
    made.take(AccessPage(records=records, revision=len(records)))
    return made


def refusal(keys: Keyring, authorization: str, at: int = 0) -> str:
    with pytest.raises(ApiError) as error:
        keys.caller(authorization, at)
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")
    return str(error.value)


def test_without_any_key_everybody_is_served() -> None:
    default = TenantRecord(id=TenantId("default"))
    anybody = caller_of(default, KeyId(""), (), Limits(), admin=True)
    assert keyring().caller("", 0) == anybody
    assert keyring(ACME).caller("Bearer anything", 0) == anybody
    limited = TenantRecord(id=TenantId("default"), limits=Limits(concurrency=3))
    assert keyring(limited).caller("", 0).accounts == (Account("tenant default", limited.limits),)


def test_a_key_is_its_tenants() -> None:
    caller = keyring(ACME, key()).caller("bearer ls-k1-s-1", 0)
    assert (caller.tenant, caller.key, caller.weight) == ("acme", "k1", 2.0)
    assert caller.accounts == (Account("tenant acme", ACME.limits),)
    assert caller.tiers == (ServiceTier.DEFAULT, ServiceTier.FLEX)
    limited = key(limits=Limits(concurrency=1))
    accounts = keyring(ACME, limited).caller("Bearer ls-k1-s-1", 0).accounts
    assert [account.name for account in accounts] == ["tenant acme", "key k1"]


@pytest.mark.parametrize(
    "header",
    ["", "ls-k1-s-1", "Basic ls-k1-s-1", "Bearer", "Bearer ls-k1-s-2", "Bearer ls-k2-s-1",
     "Bearer sk-k1-s-1", "Bearer ls-k1", "Bearer ls--", "Bearer \udcff"],
)  # fmt: skip
def test_other_keys_are_refused(header: str) -> None:
    assert "API key" in refusal(keyring(ACME, key()), header)


def test_a_revoked_an_expired_and_an_orphaned_key_are_told_so() -> None:
    mine = "Bearer ls-k1-s-1"
    assert "revoked" in refusal(keyring(ACME, key(revoked_ns=5)), mine)
    expiring = keyring(ACME, key(expires_ns=10))
    expiring.caller(mine, 9)
    assert "expired" in refusal(expiring, mine, 10)
    removed = msgspec.structs.replace(ACME, removed=True)
    assert "removed" in refusal(keyring(removed, key()), mine)
    assert "Incorrect" in refusal(keyring(ACME, key(revoked_ns=5)), "Bearer ls-k1-other")


def test_the_secret_before_counts_for_its_time() -> None:
    keys = keyring(ACME, key(digest=digest("new"), digest_before=digest("old"), before_until_ns=10))
    keys.caller("Bearer ls-k1-new", 99)
    keys.caller("Bearer ls-k1-old", 9)
    refusal(keys, "Bearer ls-k1-old", 10)
    refusal(keyring(ACME, key(before_until_ns=10)), "Bearer ls-k1-", 0)


def test_models_are_those_of_tenant_and_key() -> None:
    def models(tenant: tuple[ModelName, ...], own: tuple[ModelName, ...]) -> set[ModelName]:
        keys = keyring(msgspec.structs.replace(ACME, models=tenant), key(models=own))
        caller = keys.caller("Bearer ls-k1-s-1", 0)
        return {model for model in (A, B) if caller.may_use(model)}

    assert models((), ()) == {A, B}
    assert models((A,), ()) == {A}
    assert models((), (B,)) == {B}
    assert models((A,), (B,)) == set()


def test_an_admins_key_reaches_all() -> None:
    tenant = msgspec.structs.replace(ACME, models=(A,))
    caller = keyring(tenant, key(role=KeyRole.ADMIN)).caller("Bearer ls-k1-s-1", 0)
    assert caller.may_use(B)
    assert caller.accounts == ()
    assert caller.tiers == tuple(ServiceTier)


def test_keys_of_the_configuration_count_at_once_and_close_the_api() -> None:
    keys = Keyring((digest("static").hex(),))
    assert keys.caller("Bearer static", 0).accounts == ()
    with pytest.raises(ApiError) as error:
        keys.caller("Bearer other", 0)
    assert error.value.status == 503  # the registry may know it
    keys.take(AccessPage(records=(), revision=0))
    refusal(keys, "Bearer other")
    refusal(keys, "")


def test_digests_are_checked() -> None:
    with pytest.raises(ConfigError, match="SHA-256"):
        Keyring(("secret",))


def test_nobody_is_served_before_the_keys_are_known() -> None:
    keys = Keyring(())
    keys.take(AccessPage(records=(ACME,), revision=1, more=True))
    with pytest.raises(ApiError) as error:
        keys.caller("", 0)
    assert error.value.status == 503
    keys.take(AccessPage(records=(key(),), revision=2))
    refusal(keys, "")


def test_changes_count_from_the_next_request_on() -> None:
    keys = keyring(ACME, key())
    keys.caller("Bearer ls-k1-s-1", 0)
    light = msgspec.structs.replace(ACME, weight=0.5)
    keys.take(AccessPage(records=(light,), revision=3))
    assert keys.caller("Bearer ls-k1-s-1", 0).weight == 0.5
    keys.take(AccessPage(records=(key(revoked_ns=1),), revision=4))
    refusal(keys, "Bearer ls-k1-s-1")


def test_a_registry_that_lost_all_is_asked_anew_and_the_api_stays_closed() -> None:
    keys = keyring(ACME, key())
    keys.take(AccessPage(records=(), revision=0))
    assert keys.revision == 0
    keys.take(AccessPage(records=(), revision=0))
    refusal(keys, "")
