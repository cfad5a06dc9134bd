"""`lambdascale model add|ls|rm` and `scale`."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.cli.client import (
    absolute,
    add_cluster_options,
    add_json_option,
    connect,
    print_json,
    say,
)
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BadInput, NotFound
from shared.ids import ModelName, NodeId, check_model_name
from shared.messages import Ok
from shared.messages.pool import (
    ModelRecord,
    ModelRemove,
    Models,
    ModelsQuery,
    PoolQuery,
    PoolState,
)
from shared.messages.scaling import ImportModel, ModelImported, ScaleAccepted, SetInstances

TIMEOUT_S = 5.0
KEPT = "kept even when idle; 0 lets the model sleep (default: %(default)s)"
MOST = "default: as many as there are nodes"
IMPORT_TIMEOUT_S = 3600.0
"""Packing reads and writes the whole checkpoint."""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    model = commands.add_parser("model", help="publish, list and remove models")
    actions = model.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser("add", help="publish a Hugging Face checkpoint directory")
    add.add_argument("path", type=absolute, metavar="PATH", help="directory on the node's host")
    add.add_argument("--name", help="what requests call it (default: the directory's name)")
    add.add_argument("--node", help="which node imports it (default: the first one)")
    add.add_argument("--blocks", type=int, default=0, help="how many (default: by its size)")
    add.add_argument("--min-instances", type=int, default=1, metavar="N", help=KEPT)
    add.add_argument("--max-instances", type=int, default=0, metavar="N", help=MOST)
    add.set_defaults(run=lambda args: asyncio.run(_add(args)))
    listing = actions.add_parser("ls", help="list the models")
    listing.set_defaults(run=lambda args: asyncio.run(_list(args)))
    remove = actions.add_parser("rm", help="stop serving a model and forget it everywhere")
    remove.add_argument("name", metavar="MODEL")
    remove.set_defaults(run=lambda args: asyncio.run(_remove(args)))
    scale = commands.add_parser(
        "scale",
        help="set a model's number of instances by hand",
        description="Keeps exactly N instances of a model until told otherwise; "
        "`--instances auto` hands it back to the autoscaler.",
    )
    scale.add_argument("name", metavar="MODEL")
    scale.add_argument("--instances", required=True, metavar="N|auto", type=_instances)
    scale.set_defaults(run=lambda args: asyncio.run(_scale(args)))
    for parser in (add, listing, remove, scale):
        add_cluster_options(parser)
        add_json_option(parser)


def _instances(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'")
    return int(text)


async def import_model(
    bus: Bus,
    path: Path,
    name: ModelName,
    *,
    node: NodeId | None = None,
    blocks: int = 0,
    min_instances: int = 1,
    max_instances: int = 0,
    say: Callable[[str], None],
) -> ModelRecord:
    """Has a node (the first, unless named) pack and publish the checkpoint at an absolute path."""
    pool = await bus.request(subjects.REGISTRY_POOL, PoolQuery(), PoolState, timeout=TIMEOUT_S)
    nodes = sorted(view.info.node for view in pool.nodes)
    if not nodes:
        raise NotFound("no node is there to import the model; see `lambdascale status`")
    if node is not None and node not in nodes:
        raise NotFound(f"node {node!r} is not there; nodes are {', '.join(nodes)}")
    chosen = node or nodes[0]
    say(f"importing {path} on {chosen}")
    request = ImportModel(
        path=str(path),
        name=check_model_name(name),
        blocks=blocks,
        min_instances=min_instances,
        max_instances=max_instances,
    )
    reply = await bus.request(
        subjects.node_import(chosen), request, ModelImported, timeout=IMPORT_TIMEOUT_S
    )
    record = reply.record
    say(f"published {record.name}: {record.nbytes / 1e6:.1f} MB in {record.n_blocks} blocks")
    return record


async def _add(args: argparse.Namespace) -> int:
    if min(args.blocks, args.min_instances, args.max_instances) < 0:
        raise BadInput("--blocks, --min-instances and --max-instances must not be negative")
    async with connect(args) as bus:
        record = await import_model(
            bus,
            args.path,
            ModelName(args.name or args.path.name),
            node=args.node,
            blocks=args.blocks,
            min_instances=args.min_instances,
            max_instances=args.max_instances,
            say=say,
        )
    if args.json:
        print_json(record)
    return 0


async def _list(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        models = await bus.request(
            subjects.REGISTRY_MODELS, ModelsQuery(), Models, timeout=TIMEOUT_S
        )
    if args.json:
        print_json(models.records)
        return 0
    for record in models.records:
        sys.stdout.write(
            f"{record.name:<32} {record.nbytes / 1e6:>10.1f} MB {record.n_blocks:>4} blocks  "
            f"min {record.min_instances}  max {record.max_instances or 'nodes'}  "
            f"{record.model_id}\n"
        )
    return 0


async def _remove(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        request = ModelRemove(name=ModelName(args.name))
        await bus.request(subjects.REGISTRY_MODEL_REMOVE, request, Ok, timeout=TIMEOUT_S)
    if args.json:
        print_json({"removed": args.name})
    return 0


async def _scale(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        request = SetInstances(name=ModelName(args.name), instances=args.instances)
        reply = await bus.request(subjects.PLANNER_SCALE, request, ScaleAccepted, timeout=TIMEOUT_S)
    if args.json:
        print_json({"model": args.name, "instances": args.instances, "event": reply.event})
    elif reply.event:
        sys.stdout.write(f"{reply.event}\n")
    return 0
