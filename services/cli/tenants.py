"""`lambdascale tenant add|set|ls|rm`: who shares the cluster, and what each may use."""

import argparse
import asyncio
from typing import Any

import msgspec

from services.cli.access import add_limit_options, changed, limits_text, names, records
from services.cli.arguments import amount
from services.cli.client import add_cluster_options, add_json_option, connect, print_json, say
from services.cli.status_text import console, print_table
from shared.errors import BadInput
from shared.ids import TenantId
from shared.messages.access import (
    DEFAULT_TENANT,
    KeyRecord,
    RemoveTenant,
    ServiceTier,
    SetTenant,
    TenantRecord,
)

DESCRIPTION = """\
Tenants share the cluster. Each has a weight, limits, and API keys (`lambdascale key`). What is
changed counts at every gateway within a second.

Whoever needs no key belongs to the tenant `default`, which is there without being added.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "tenant",
        help="add, change, list and remove tenants",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser("add", help="add a tenant", description="Adds a tenant.")
    change = actions.add_parser(
        "set",
        help="change a tenant",
        description="Changes a tenant. What is not named stays as it is.",
    )
    listing = actions.add_parser("ls", help="list the tenants", description="Lists the tenants.")
    remove = actions.add_parser(
        "rm", help="remove a tenant", description="Removes a tenant. Its keys are revoked before."
    )
    for action in (add, change):
        action.add_argument(
            "--weight",
            type=amount,
            metavar="W",
            help="its share of a model's instances beside other tenants that wait (default: 1)",
        )
        action.add_argument(
            "--tiers",
            type=_tiers,
            metavar="A,B",
            help="the service tiers that its requests may ask for: priority, default, flex "
            "(default: default,flex)",
        )
        action.add_argument(
            "--models",
            type=names,
            metavar="A,B|all",
            help="the models that it may use (default: all)",
        )
        add_limit_options(action, default=None)
    for action in (add, change, remove):
        action.add_argument("id", metavar="TENANT", help="the tenant's id")
    for action in (add, change, listing, remove):
        add_cluster_options(action)
    add_json_option(listing)
    add.set_defaults(run=lambda args: asyncio.run(_set(args, new=True)))
    change.set_defaults(run=lambda args: asyncio.run(_set(args, new=False)))
    listing.set_defaults(run=lambda args: asyncio.run(_list(args)))
    remove.set_defaults(run=lambda args: asyncio.run(_remove(args)))


def _tiers(text: str) -> tuple[ServiceTier, ...]:
    try:
        return tuple(ServiceTier(name) for name in text.split(","))
    except ValueError:
        known = ", ".join(tier.value for tier in ServiceTier)
        raise argparse.ArgumentTypeError(f"{text!r} is no list of tiers ({known})") from None


async def _set(args: argparse.Namespace, *, new: bool) -> int:
    fields = ("weight", "tiers", "requests_per_min", "tokens_per_min", "concurrency", "models")
    given = {field: getattr(args, field) for field in fields if getattr(args, field) is not None}
    if not new and not given:
        raise BadInput("name what is to change: `lambdascale tenant set --help` lists it")
    async with connect(args) as bus:
        record = await changed(bus, SetTenant(id=TenantId(args.id), new=new, **given))
    assert isinstance(record, TenantRecord)
    say(f"{record.id}: {_text(record)}")
    return 0


def _text(tenant: TenantRecord) -> str:
    return (
        f"weight {tenant.weight:g}, limits: {limits_text(tenant.limits)}, "
        f"tiers: {','.join(tier.value for tier in tenant.tiers)}, "
        f"models: {','.join(tenant.models) or 'all'}"
    )


async def _list(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        found = await records(bus)
    keys = [record for record in found if isinstance(record, KeyRecord) and not record.revoked_ns]
    there = {
        record.id: record
        for record in found
        if isinstance(record, TenantRecord) and not record.removed
    }
    there.setdefault(DEFAULT_TENANT, TenantRecord(id=DEFAULT_TENANT))
    tenants = [there[tenant] for tenant in sorted(there)]
    counts = {tenant.id: sum(key.tenant == tenant.id for key in keys) for tenant in tenants}
    if args.json:
        print_json(
            [
                {
                    "id": tenant.id,
                    "weight": tenant.weight,
                    "tiers": [tier.value for tier in tenant.tiers],
                    "limits": msgspec.structs.asdict(tenant.limits),
                    "models": tenant.models,
                    "keys": counts[tenant.id],
                }
                for tenant in tenants
            ]
        )
        return 0
    rows = [
        {
            "id": tenant.id,
            "weight": f"{tenant.weight:g}",
            "limits": limits_text(tenant.limits),
            "tiers": ",".join(tier.value for tier in tenant.tiers),
            "models": ",".join(tenant.models) or "all",
            "keys": counts[tenant.id],
        }
        for tenant in tenants
    ]
    print_table(console(), "tenants", rows)
    return 0


async def _remove(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        await changed(bus, RemoveTenant(id=TenantId(args.id)))
    say(f"tenant {args.id} is removed")
    return 0
