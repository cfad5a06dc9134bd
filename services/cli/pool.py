"""`lambdascale pool`: where each model has its copies, and what the nodes have room for."""

import argparse
import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from services.cli.client import add_cluster_options, add_json_option, connect, print_json
from services.cli.status_text import console, print_table
from services.local.copies import copies
from shared.messages.copies import Durable, ModelCopies, NodeTiers, PoolCopies

DESCRIPTION = """\
Shows where each model has its copies: on devices, in host memory, and on disks; what is missing,
and why; and how much of each tier the nodes use.
"""
COLUMNS = """\
columns:
  models  device: nodes that run the whole model, or have it in parts; host: nodes that hold it in
          memory (in the arena or the host cache) and do not run all of it; durable: nodes that hold
          it on disk, with the machine where it has another name (copies on one machine count once);
          lacking: what is missing of the copies that registry.durable_copies and
          registry.host_copies ask for
  nodes   memory: for weights (node.arena_bytes), used of all; host: the host cache
          (node.host_bytes), used of all; disk: the disk with the packed models, used of all
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "pool",
        help="show where each model has its copies",
        description=DESCRIPTION,
        epilog=COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_cluster_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=lambda args: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        found = await copies(bus)
    if args.json:
        print_json(
            {
                "models": msgspec.to_builtins(found.models),
                "nodes": msgspec.to_builtins(found.nodes),
                "memory_bytes": found.memory_bytes,
                "per_host_bytes": found.per_host_bytes,
            }
        )
    else:
        print_pool(found)
    return 0


def print_pool(found: PoolCopies) -> None:
    out = console()
    print_table(out, "models", [_model(model) for model in found.models])
    print_table(out, "nodes", [_node(node) for node in found.nodes])
    out.print(
        f"copies in memory that do not run: {found.memory_bytes / 1e6:.1f} MB; every model in the "
        f"memory of every machine would take {found.per_host_bytes / 1e6:.1f} MB"
    )


def _model(model: ModelCopies) -> Mapping[str, object]:
    return {
        "name": model.name,
        "MB": f"{model.nbytes / 1e6:.1f}",
        "device": ", ".join(model.device) or _in_parts(model),
        "host": ", ".join(model.host),
        "durable": _places(model.durable),
        "lacking": model.shortfall,
    }


def _in_parts(model: ModelCopies) -> str:
    return f"in parts: {', '.join(model.together)}" if model.together else ""


def _places(durable: Iterable[Durable]) -> str:
    return ", ".join(
        copy.node if copy.node == copy.machine else f"{copy.node} ({copy.machine})"
        for copy in durable
    )


def _node(node: NodeTiers) -> Mapping[str, object]:
    return {
        "id": node.node,
        "machine": node.machine,
        "rack": node.rack,
        "memory MB": _used(node.arena_bytes - node.arena_free, node.arena_bytes, 1e6),
        "host MB": _used(node.host_bytes - node.host_free, node.host_bytes, 1e6),
        "disk GB": _used(node.disk_bytes - node.disk_free, node.disk_bytes, 1e9),
    }


def _used(used: int, nbytes: int, unit: float) -> str:
    return f"{used / unit:.0f} of {nbytes / unit:.0f}" if nbytes else ""
