"""`lambdascale status`: processes, nodes and their blocks, instances and the last events."""

import argparse
import asyncio
import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from services.cli.client import add_cluster_options, add_json_option, connect, print_json, state_of
from services.cli.processes import ClusterState
from shared import subjects
from shared.bus.base import Bus
from shared.ids import ModelId, NodeId
from shared.messages.instances import InstanceSet
from shared.messages.pool import NodeView, PoolQuery, PoolState
from shared.messages.scaling import EventRecord, PlannerQuery, PlannerState

TIMEOUT_S = 5.0
EVENTS = 10


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "status",
        help="show the cluster: processes, nodes, blocks, instances, events",
        description="Shows the cluster: processes, nodes and the blocks they hold, instances, "
        "and the last scaling events.",
    )
    add_cluster_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


async def query(bus: Bus) -> tuple[PoolState, PlannerState]:
    return await asyncio.gather(
        bus.request(subjects.REGISTRY_POOL, PoolQuery(), PoolState, timeout=TIMEOUT_S),
        bus.request(
            subjects.PLANNER_STATE, PlannerQuery(events=EVENTS), PlannerState, timeout=TIMEOUT_S
        ),
    )


async def _run(args: argparse.Namespace) -> int:
    state = state_of(args)
    async with connect(args) as bus:
        pool, planner = await query(bus)
    document = describe(state, pool, planner)
    if args.json:
        print_json(document)
    else:
        _print(document)
    return 0


def describe(state: ClusterState, pool: PoolState, planner: PlannerState) -> dict[str, Any]:
    """The document that `status --json` prints."""
    names = {record.model_id: record.name for record in pool.models}
    serving = _serving(planner.sets)
    return {
        "gateway_url": state.gateway_url,
        "processes": [
            {"name": p.name, "role": p.role, "pid": p.pid, "state": p.state}
            for p in state.processes
        ],
        "models": [msgspec.to_builtins(record) for record in pool.models],
        "nodes": [_node(view, names, serving) for view in pool.nodes],
        "instances": [
            {
                "id": instance.id,
                "model": instances.name,
                "state": instance.state.value,
                "capacity": round(instance.capacity, 3),
                "slots": instance.slots,
                "stages": [{"node": s.node, "blocks": [s.start, s.stop]} for s in instance.stages],
                "event": instance.event,
            }
            for instances in planner.sets
            for instance in instances.instances
        ],
        "events": [_event(record) for record in planner.events],
    }


def _serving(sets: tuple[InstanceSet, ...]) -> set[NodeId]:
    return {s.node for one in sets for instance in one.instances for s in instance.stages}


def _node(view: NodeView, names: dict[ModelId, Any], serving: set[NodeId]) -> dict[str, Any]:
    blocks: dict[str, dict[str, list[int]]] = {}
    for holding in view.holdings:
        tiers = blocks.setdefault(names.get(holding.model_id, holding.model_id), {})
        tiers[holding.tier.value] = list(holding.blocks)
    waiting = "reserved" if view.reserved_by else "idle"
    state = "serving" if view.info.node in serving else waiting
    return {
        "id": view.info.node,
        "state": state,
        "host": view.info.host,
        "device": view.info.device,
        "address": view.info.address,
        "arena_free": view.arena_free,
        "blocks": blocks,
    }


def _event(record: EventRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "model": record.name,
        "state": record.state.value,
        "cause": record.cause,
        "sources": list(record.sources),
        "targets": list(record.targets),
        "revision": record.revision,
        "predicted": msgspec.to_builtins(record.predicted),
        "actual": msgspec.to_builtins(record.actual),
        "physical_limit_s": record.physical_limit_s,
        "bytes_moved": record.bytes_moved,
        "error": record.error,
    }


def _print(document: dict[str, Any]) -> None:
    console = Console(file=sys.stdout)
    if document["gateway_url"]:
        console.print(f"gateway {document['gateway_url']}")
    if document["processes"]:
        console.print(_table("processes", ("name", "role", "pid", "state"), document["processes"]))
    nodes = [
        {**node, "blocks": _blocks_text(node["blocks"]),
         "free MB": f"{node['arena_free'] / 1e6:.0f}"}
        for node in document["nodes"]
    ]  # fmt: skip
    console.print(_table("nodes", ("id", "state", "device", "free MB", "blocks"), nodes))
    paths = [
        {**i, "stages": " -> ".join(
            f"{s['node']} {s['blocks'][0]}-{s['blocks'][1] - 1}" for s in i["stages"]
        )}
        for i in document["instances"]
    ]  # fmt: skip
    columns = ("id", "model", "state", "capacity", "slots", "stages")
    console.print(_table("instances", columns, paths))
    events = [
        {**e, "targets": ",".join(e["targets"]), "seconds": e["actual"]["all_complete_s"]}
        for e in document["events"]
    ]
    columns = ("id", "model", "state", "targets", "seconds", "cause")
    console.print(_table("events", columns, events))


def _blocks_text(blocks: dict[str, dict[str, list[int]]]) -> str:
    return "; ".join(
        f"{model}: " + ", ".join(f"{tier} {len(held)}" for tier, held in tiers.items())
        for model, tiers in blocks.items()
    )


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", expand=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        value = [row[column] for column in columns]
        table.add_row(*("" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v)
                        for v in value))  # fmt: skip
    return table
