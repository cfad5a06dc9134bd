"""`lambdascale key add|ls|rotate|revoke|static`: who may call the gateways."""

import argparse
import asyncio
import hashlib
import secrets
import sys
from datetime import UTC, datetime
from typing import Any

from services.cli.access import (
    add_limit_options,
    changed,
    duration,
    lasting_text,
    limits_text,
    names,
    records,
)
from services.cli.client import add_cluster_options, add_json_option, connect, print_json, say
from services.cli.status_text import console, print_table
from shared.clock import wall_ns
from shared.errors import NotFound
from shared.ids import KeyId, TenantId, id_source
from shared.messages.access import (
    DEFAULT_TENANT,
    AddKey,
    KeyRecord,
    KeyRole,
    Limits,
    RevokeKey,
    RotateKey,
)

SECRET_BYTES = 32
GRACE = "1h"
DESCRIPTION = """\
API keys of tenants. Clients send them: `Authorization: Bearer KEY`. What is changed counts at
every gateway within a second.

As soon as a cluster has its first key, gateways serve nobody without one.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "key",
        help="add, list, rotate and revoke API keys",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser(
        "add",
        help="make a key",
        description="Makes a key and prints it. It is shown this once: the cluster keeps only a "
        "digest of its secret.",
    )
    add.add_argument(
        "--tenant", default=DEFAULT_TENANT, metavar="TENANT", help="whose it is (default: default)"
    )
    add.add_argument(
        "--admin",
        action="store_true",
        help="an operator's own key: it reaches every model, and no limit counts for it",
    )
    add.add_argument(
        "--expires",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="how long it counts, such as 90d or 12h (default: until it is revoked)",
    )
    add.add_argument(
        "--models",
        type=names,
        default=(),
        metavar="A,B",
        help="the models that it reaches (default: all of its tenant's)",
    )
    add_limit_options(add, default=0)
    add.set_defaults(run=lambda args: asyncio.run(_add(args)))
    listing = actions.add_parser("ls", help="list the keys", description="Lists the keys.")
    listing.add_argument("--tenant", metavar="TENANT", help="only this tenant's")
    listing.set_defaults(run=lambda args: asyncio.run(_list(args)))
    rotate = actions.add_parser(
        "rotate",
        help="give a key a new secret",
        description="Makes a new secret for a key and prints the new key. The key before counts "
        "for some time beside it, so that clients can change over.",
    )
    rotate.add_argument(
        "--grace",
        type=duration,
        default=GRACE,
        metavar="TIME",
        help="how long the key before counts (default: %(default)s)",
    )
    rotate.set_defaults(run=lambda args: asyncio.run(_rotate(args)))
    revoke = actions.add_parser(
        "revoke",
        help="end a key",
        description="Ends a key for ever. Requests that run go on to their end.",
    )
    revoke.set_defaults(run=lambda args: asyncio.run(_revoke(args)))
    for action in (rotate, revoke):
        action.add_argument("id", metavar="ID", help="the part of ls-ID-SECRET, as `key ls` shows")
    for action in (add, listing, rotate, revoke):
        add_cluster_options(action)
    static = actions.add_parser(
        "static",
        help="make a key for gateway.api_keys",
        description="Prints a fresh key and its SHA-256, for gateway.api_keys of the "
        "configuration. Such a key counts from a gateway's start and without the registry, and "
        "has the rights of --admin. It needs no cluster.",
    )
    static.set_defaults(run=_static)
    for action in (add, listing, rotate, static):
        add_json_option(action)


async def _add(args: argparse.Namespace) -> int:
    key, secret = KeyId(id_source()), _secret()
    change = AddKey(
        id=key,
        tenant=TenantId(args.tenant),
        digest=_digest(secret),
        role=KeyRole.ADMIN if args.admin else KeyRole.USER,
        limits=Limits(
            requests_per_min=args.requests_per_min,
            tokens_per_min=args.tokens_per_min,
            concurrency=args.concurrency,
        ),
        models=args.models,
        lasts_s=args.expires,
    )
    async with connect(args) as bus:
        await changed(bus, change)
    say(f"a key of tenant {args.tenant}; it is not shown again:")
    _show(args, key, secret)
    return 0


async def _rotate(args: argparse.Namespace) -> int:
    key, secret = KeyId(args.id), _secret()
    async with connect(args) as bus:
        await changed(bus, RotateKey(id=key, digest=_digest(secret), grace_s=args.grace))
    say(f"the key before counts for {lasting_text(args.grace)}; the new one is not shown again:")
    _show(args, key, secret)
    return 0


async def _revoke(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        await changed(bus, RevokeKey(id=KeyId(args.id)))
    say(f"key {args.id} is revoked")
    return 0


async def _list(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        found = [record for record in await records(bus) if isinstance(record, KeyRecord)]
    if args.tenant:
        found = [key for key in found if key.tenant == args.tenant]
        if not found:
            raise NotFound(f"tenant {args.tenant} has no keys")
    found.sort(key=lambda key: (key.tenant, key.created_ns))
    now_ns = wall_ns()
    if args.json:
        print_json([_document(key, now_ns) for key in found])
        return 0
    rows = [
        {
            "id": key.id,
            "tenant": key.tenant,
            "role": key.role.value,
            "state": state_of(key, now_ns),
            "limits": limits_text(key.limits),
            "models": ",".join(key.models) or "all",
            "created": _day(key.created_ns),
        }
        for key in found
    ]
    print_table(console(), "keys", rows)
    return 0


def state_of(key: KeyRecord, now_ns: int) -> str:
    if key.revoked_ns:
        return "revoked"
    if key.expires_ns and now_ns >= key.expires_ns:
        return "expired"
    left = [f"until {_day(key.expires_ns)}"] if key.expires_ns else []
    if now_ns < key.before_until_ns:
        rest_s = (key.before_until_ns - now_ns) / 1e9
        left.append(f"the one before for {lasting_text(rest_s)}")
    return ", ".join(["counts", *left])


def _document(key: KeyRecord, now_ns: int) -> dict[str, object]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "role": key.role.value,
        "state": state_of(key, now_ns).partition(",")[0],
        "limits": {field: getattr(key.limits, field) for field in Limits.__struct_fields__},
        "models": key.models,
        "created_ns": key.created_ns,
        "expires_ns": key.expires_ns,
        "before_until_ns": key.before_until_ns,
    }


def _static(args: argparse.Namespace) -> int:
    key = f"sk-{_secret()}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    if args.json:
        print_json({"key": key, "sha256": digest})
        return 0
    sys.stdout.write(f"key:    {key}\nsha256: {digest}\n")
    return 0


def _show(args: argparse.Namespace, key: KeyId, secret: str) -> None:
    text = f"ls-{key}-{secret}"
    if args.json:
        print_json({"id": key, "key": text})
    else:
        sys.stdout.write(f"{text}\n")


def _secret() -> str:
    return secrets.token_urlsafe(SECRET_BYTES)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _day(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
