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
    ask,
    connect,
    print_json,
    say,
)
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BadInput, NotFound
from shared.ids import ModelName, NodeId, check_model_name
from shared.messages import Message, Ok
from shared.messages.instances import InstanceSet, InstanceState
from shared.messages.load import GatewayLoad
from shared.messages.pool import (
    ModelRecord,
    ModelRemove,
    Models,
    ModelsQuery,
    PoolQuery,
    PoolState,
)
from shared.messages.scaling import (
    EventChanged,
    EventState,
    ImportModel,
    ModelImported,
    ScaleAccepted,
    SetInstances,
)

KEPT = "kept even when idle; 0 lets the model sleep (default: %(default)s)"
MOST = "default: as many as there are nodes"
IMPORT_TIMEOUT_S = 3600.0
"""Packing reads and writes the whole checkpoint."""
SERVED_S = 60.0


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
    pool = await ask(bus, subjects.REGISTRY_POOL, PoolQuery(), PoolState)
    nodes = sorted(view.info.node for view in pool.nodes)
    if not nodes:
        raise NotFound("no node is there to import the model; see `lambdascale status`")
    if node is not None and node not in nodes:
        raise NotFound(f"node {node!r} is not there; nodes are {', '.join(nodes)}")
    check_model_name(name)
    chosen = node or nodes[0]
    say(f"importing {path} on {chosen}")
    request = ImportModel(
        path=str(path),
        name=name,
        blocks=blocks,
        min_instances=min_instances,
        max_instances=max_instances,
    )
    reply = await ask(
        bus, subjects.node_import(chosen), request, ModelImported, timeout=IMPORT_TIMEOUT_S
    )
    record = reply.record
    say(f"published {record.name}: {record.nbytes / 1e6:.1f} MB in {record.n_blocks} blocks")
    return record


class _Served:
    """Hears on the bus whether a gateway can hand requests for the model to an instance."""

    def __init__(self, name: ModelName, say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._instance = False
        self._over = asyncio.Event()

    async def follow(self, bus: Bus) -> None:
        for subject in (subjects.INSTANCES, subjects.LOAD_GATEWAY, subjects.EVENTS):
            await bus.subscribe(subject, self._on)

    async def wait(self) -> None:
        try:
            async with asyncio.timeout(SERVED_S):
                await self._over.wait()
        except TimeoutError:
            self._say(f"nothing serves {self._name} yet: `lambdascale events` tells more")

    async def _on(self, message: Message) -> None:
        match message:
            case InstanceSet(name=self._name):
                states = [instance.state for instance in message.instances]
                self._instance = InstanceState.SERVING in states
            case GatewayLoad() if self._instance:
                if any(load.model == self._name for load in message.models):
                    self._over.set()
            case EventChanged():
                record = message.record
                if record.name == self._name and record.state is EventState.FAILED:
                    self._say(f"{record.id} failed: {record.error}")
            case _:
                pass


async def publish(
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
    """Imports a model, and waits until it is served, unless it may sleep."""
    served = _Served(name, say)
    await served.follow(bus)
    record = await import_model(
        bus,
        path,
        name,
        node=node,
        blocks=blocks,
        min_instances=min_instances,
        max_instances=max_instances,
        say=say,
    )
    if record.min_instances:
        await served.wait()
    return record


async def _add(args: argparse.Namespace) -> int:
    if min(args.blocks, args.min_instances, args.max_instances) < 0:
        raise BadInput("--blocks, --min-instances and --max-instances must not be negative")
    if 0 < args.max_instances < args.min_instances:
        raise BadInput(f"--max-instances {args.max_instances} is less than --min-instances")
    async with connect(args) as bus:
        record = await publish(
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
        models = await ask(bus, subjects.REGISTRY_MODELS, ModelsQuery(), Models)
    if args.json:
        print_json(models.records)
        return 0
    if not models.records:
        say("no models: publish one with `lambdascale model add PATH`")
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
        await ask(bus, subjects.REGISTRY_MODEL_REMOVE, request, Ok)
    if args.json:
        print_json({"removed": args.name})
    else:
        say(f"removed {args.name}")
    return 0


async def _scale(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        request = SetInstances(name=ModelName(args.name), instances=args.instances)
        reply = await ask(bus, subjects.PLANNER_SCALE, request, ScaleAccepted)
    if args.json:
        print_json({"model": args.name, "instances": args.instances, "event": reply.event})
    elif reply.event:
        sys.stdout.write(f"{reply.event}\n")
    else:
        say(f"{args.name}: no scaling event was needed")
    return 0
