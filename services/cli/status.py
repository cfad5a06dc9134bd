"""`lambdascale status`: processes, nodes and their blocks, instances and the last events."""

import argparse
import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from services.cli.client import (
    add_cluster_options,
    add_json_option,
    connect,
    print_json,
    say,
    state_of,
)
from services.cli.status_text import COLUMNS, print_status
from services.local.asking import ask
from services.local.copies import copies, shortfalls
from services.local.processes import ClusterState
from shared import subjects
from shared.bus.base import Bus, On
from shared.election.lease import LeaseRecord
from shared.errors import BusError
from shared.ids import GatewayId, InstanceId, ModelId, NodeId
from shared.messages.instances import InstanceSet
from shared.messages.load import WHOLE_S, GatewayLoad
from shared.messages.pool import NodeView, PoolState
from shared.messages.scaling import EventRecord, PlannerQuery, PlannerState
from shared.pool_pages import read_pool

EVENTS = 10
LISTEN_S = WHOLE_S + 0.2
"""How long to listen to gateways: each has said everything once by then."""
KeptOut = Mapping[InstanceId, Mapping[GatewayId, str]]
"""Which gateways leave an instance alone, and why."""
_PARTS = {True: "active", False: "stands by"}
DESCRIPTION = """\
Shows the cluster: processes, models, nodes and the blocks they hold, instances, and the last
scaling events. Exits with 1 if no cluster runs, or if a part of it does not answer; it then shows
the other parts.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "status",
        help="show the cluster: processes, models, nodes, instances, events",
        description=DESCRIPTION,
        epilog=COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_cluster_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    state = state_of(args)
    pool, planner, lacking, active, kept_out, errors = await _query(args)
    document = describe(state, pool, planner, lacking, errors, active, kept_out)
    if args.json:
        print_json(document)
    else:
        print_status(document)
    for error in errors:
        say(f"lambdascale: {error}")
    return 1 if errors else 0


async def _query(
    args: argparse.Namespace,
) -> tuple[PoolState, PlannerState, dict[str, str], dict[str, LeaseRecord], KeptOut, list[str]]:
    """What registry and planner say, what durable copies models lack, which processes are active,
    what gateways leave alone, and the errors of those that say nothing."""
    pool, planner = PoolState(nodes=(), models=()), PlannerState(sets=(), events=())
    lacking: dict[str, str] = {}
    active: dict[str, LeaseRecord] = {}
    kept_out: KeptOut = {}
    errors: list[str] = []
    try:
        async with connect(args) as bus, asyncio.TaskGroup() as group:
            listening = group.create_task(_kept_out(bus))
            try:
                pool = await read_pool(partial(ask, bus))
                lacking = shortfalls(await copies(bus))
            except BusError as error:
                errors.append(str(error))
            try:
                active = await _active(bus)
            except BusError as error:
                errors.append(str(error))
            try:
                query = PlannerQuery(events=EVENTS)
                planner = await ask(bus, subjects.PLANNER_STATE, query, PlannerState)
            except BusError as error:
                errors.append(str(error))
            kept_out = await listening
    except* BusError as failed:
        errors.extend(str(error) for error in failed.exceptions)
    return pool, planner, lacking, active, kept_out, errors


async def _kept_out(bus: Bus) -> KeptOut:
    """What all gateways say of instances that they leave alone."""
    found: dict[InstanceId, dict[GatewayId, str]] = {}

    async def hear(load: GatewayLoad) -> None:
        for model in load.models:
            for instance, why in model.kept_out.items():
                found.setdefault(instance, {})[load.gateway] = why

    await bus.subscribe(subjects.LOAD_GATEWAY, On(GatewayLoad, hear))
    await asyncio.sleep(LISTEN_S)
    return found


async def _active(bus: Bus) -> dict[str, LeaseRecord]:
    """The lease of each role of which one process is active."""
    found = {}
    for entry in await (await bus.kv(subjects.KV_ACTIVE)).entries():
        with suppress(msgspec.MsgspecError):
            found[entry.key] = msgspec.msgpack.decode(entry.value, type=LeaseRecord)
    return {role: lease for role, lease in found.items() if lease.holder}


def processes_of(
    state: ClusterState, active: Mapping[str, LeaseRecord] | None = None
) -> list[dict[str, Any]]:
    """`active`: the leases of roles of which one process is active."""
    pids = {role: lease.pid for role, lease in (active or {}).items()}
    return [
        {
            "name": p.name,
            "role": p.role,
            "pid": p.pid,
            "state": p.state,
            "part": "" if p.role not in pids else _PARTS[p.pid == pids[p.role]],
            "since": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(p.since)),
            "restarts": p.restarts,
            "last_exit": p.last_exit,
        }
        for p in state.processes
    ]


def describe(
    state: ClusterState,
    pool: PoolState,
    planner: PlannerState,
    lacking: Mapping[str, str],
    errors: Sequence[str] = (),
    active: Mapping[str, LeaseRecord] | None = None,
    kept_out: KeptOut | None = None,
) -> dict[str, Any]:
    """The document that `status --json` prints. `lacking`: by model, what is missing of its durable
    copies. `active`: the leases of roles of which one process is active."""
    active, kept_out = active or {}, kept_out or {}
    names = {record.model_id: record.name for record in pool.models}
    serving = _serving(planner.sets)
    fixed = {instances.name: instances.fixed for instances in planner.sets}
    return {
        "gateway_url": state.gateway_url,
        "gateway_urls": state.gateway_urls,
        "processes": processes_of(state, active),
        "active": {
            role: {"host": lease.host, "pid": lease.pid, "term": lease.term}
            for role, lease in sorted(active.items())
        },
        "models": [
            {**msgspec.to_builtins(record), "fixed": fixed.get(record.name)}
            for record in pool.models
        ],
        "nodes": [_node(view, names, serving) for view in pool.nodes],
        "instances": [
            {
                "id": instance.id,
                "model": instances.name,
                "state": instance.state.value,
                "capacity": round(instance.capacity, 3),
                "slots": instance.slots,
                "role": instance.role.value,
                "group": instance.group,
                "stages": [{"node": s.node, "blocks": [s.start, s.stop]} for s in instance.stages],
                "event": instance.event,
                "kept_out": dict(kept_out.get(instance.id, {})),
            }
            for instances in planner.sets
            for instance in instances.instances
        ],
        "events": [_event(record) for record in planner.events],
        "shortfall": [{"model": name, "text": lacking[name]} for name in lacking],
        "errors": list(errors),
    }


def _serving(sets: Iterable[InstanceSet]) -> set[NodeId]:
    return {s.node for one in sets for instance in one.instances for s in instance.stages}


def _node(view: NodeView, names: Mapping[ModelId, str], serving: set[NodeId]) -> dict[str, Any]:
    blocks: dict[str, dict[str, list[int]]] = {}
    for holding in view.holdings:
        tiers = blocks.setdefault(names.get(holding.model_id, holding.model_id), {})
        tiers[holding.tier.value] = list(holding.blocks)
    waiting = "reserved" if view.reserved_by else "idle"
    state = "serving" if view.info.node in serving else waiting
    state = "unfit" if view.unfit else state
    return {
        "id": view.info.node,
        "state": state,
        "unfit": view.unfit,
        "duty": view.info.duty.value,
        "host": view.info.host,
        "device": view.info.device,
        "staging": view.info.staging,
        "address": view.info.address,
        "arena_free": view.arena_free,
        "kv_used": view.kv_used,
        "kv_capacity": view.kv_capacity,
        "prompt_tokens": view.prompt_tokens,
        "cached_tokens": view.cached_tokens,
        "preemptions": view.preemptions,
        "blocks": blocks,
        "peers": {way: list(nodes) for way, nodes in view.peers.items()},
    }


def _event(record: EventRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "model": record.name,
        "state": record.state.value,
        "cause": record.cause,
        "sources": list(record.sources),
        "targets": list(record.targets),
        "parts": {node: [part.start, part.stop] for node, part in record.parts.items()},
        "revision": record.revision,
        "growths": msgspec.to_builtins(record.growths),
        "predicted": msgspec.to_builtins(record.predicted),
        "actual": msgspec.to_builtins(record.actual),
        "physical_limit_s": record.physical_limit_s,
        "bytes_moved": record.bytes_moved,
        "error": record.error,
    }
