"""`lambdascale model add|ls|rm|demo` and `scale`."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.cli import hub, model_set
from services.cli.client import (
    absolute,
    add_cluster_options,
    add_json_option,
    connect,
    print_json,
    say,
)
from services.cli.model_set import rules, wanted
from services.cli.status_text import console, print_table
from services.local.asking import ask
from services.local.publishing import publish
from shared import subjects
from shared.bus.base import Bus
from shared.errors import BadInput, BusError
from shared.ids import ModelName, check_model_name
from shared.messages import Ok
from shared.messages.pool import ModelRemove, Models, ModelsQuery
from shared.messages.scaling import (
    ImportModel,
    PlannerQuery,
    PlannerState,
    ScaleAccepted,
    SetInstances,
)

KEPT = "instances that it keeps even when idle; 0 lets it sleep (default: %(default)s)"
MOST = "instances that it has at most (default: as many as there are nodes)"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    model = commands.add_parser("model", help="publish, change, list, remove and make models")
    actions = model.add_subparsers(metavar="ACTION", required=True)
    add = actions.add_parser(
        "add",
        help="publish a Hugging Face checkpoint: a directory, or a model of the Hub",
        description="Has a node import a Hugging Face checkpoint, publishes the model, and waits "
        "until an instance serves it if it keeps any (--min-instances). If not, the first "
        "request loads it. A model of the Hub is fetched to this machine first, where the node "
        "has to be: only what is needed of it, with every file's digest checked. Call it again to "
        "go on after a break. HF_TOKEN says who asks (for gated and private models), HF_ENDPOINT "
        "where the Hub is.",
    )
    add.add_argument(
        "path",
        metavar=hub.FORMS,
        help="directory on the machine of the node that imports it, or a model of the Hub; "
        "@REVISION behind its name means a branch, a tag or a commit",
    )
    hub.add_cache_option(add)
    add.add_argument(
        "--name", help="the model's name in requests (default: the directory's, or the Hub's)"
    )
    add.add_argument("--node", help="the node that imports it (default: the first node)")
    add.add_argument(
        "--base",
        metavar="MODEL",
        help="PATH has a LoRA adapter, as PEFT saves it, of this published model, whose instances "
        "serve it",
    )
    add.add_argument(
        "--blocks", type=int, default=0, help="number of blocks (default: by its size)"
    )
    add.add_argument("--min-instances", type=int, default=0, metavar="N", help=KEPT)
    add.add_argument("--max-instances", type=int, default=0, metavar="N", help=MOST)
    add.set_defaults(run=_add)
    change = model_set.add_parser(actions)
    listing = actions.add_parser(
        "ls",
        aliases=["list"],
        help="list the models",
        description="Lists the published models: name, size, number of blocks, how many instances "
        "the autoscaler may choose from (or what `lambdascale scale` set), what `model set` has "
        "set besides, and id.",
    )
    listing.set_defaults(run=lambda args: asyncio.run(_list(args)))
    remove = actions.add_parser(
        "rm",
        aliases=["remove"],
        help="stop serving a model and forget it everywhere",
        description="Stops serving a model, and has every node forget it in memory and on disk. "
        "The checkpoint that it was imported from stays.",
    )
    remove.add_argument("name", metavar="MODEL", help="the model's name")
    remove.set_defaults(run=lambda args: asyncio.run(_remove(args)))
    demo = actions.add_parser(
        "demo",
        help="make a small checkpoint to try things with",
        description="Writes the checkpoint of the demo's model: a very small Llama that says "
        "English sentences, and knows next to nothing.",
    )
    demo.add_argument("path", type=absolute, metavar="PATH", help="directory to make")
    demo.set_defaults(run=_demo)
    scale = commands.add_parser(
        "scale",
        help="set a model's number of instances by hand",
        description="Keeps exactly N instances of a model until told otherwise; "
        "`--instances auto` hands it back to the autoscaler.",
    )
    scale.add_argument("name", metavar="MODEL", help="the model's name")
    scale.add_argument(
        "--instances",
        required=True,
        metavar="N|auto",
        type=_instances,
        help="how many; 0 refuses requests; auto: the autoscaler decides",
    )
    scale.set_defaults(run=lambda args: asyncio.run(_scale(args)))
    for parser in (add, change, listing, remove, scale):
        add_cluster_options(parser)
        add_json_option(parser)


def _instances(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'")
    return int(text)


def _add(args: argparse.Namespace) -> int:
    if min(args.blocks, args.min_instances, args.max_instances) < 0:
        raise BadInput("--blocks, --min-instances and --max-instances must not be negative")
    if 0 < args.max_instances < args.min_instances:
        raise BadInput(f"--max-instances {args.max_instances} is less than --min-instances")
    if args.base and (args.blocks or args.min_instances or args.max_instances):
        raise BadInput("an adapter has no blocks and no instances of its own: set its base's")
    name = check_model_name(args.name or hub.name_of(args.path))
    if hub.is_on_hub(args.path):
        asyncio.run(_reach(args))  # nothing is fetched for a cluster that is not there
    return asyncio.run(_publish(args, name, hub.local(args.path, args.cache)))


async def _reach(args: argparse.Namespace) -> None:
    async with connect(args):
        pass


async def _publish(args: argparse.Namespace, name: ModelName, path: Path) -> int:
    async with connect(args) as bus:
        record = await publish(
            bus,
            ImportModel(
                path=str(path),
                name=name,
                blocks=args.blocks,
                min_instances=args.min_instances,
                max_instances=args.max_instances,
                base=ModelName(args.base or ""),
            ),
            node=args.node,
            say=say,
        )
    if args.json:
        print_json(record)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from services.local.talking.wide import make_wide  # imports torch: a second

    if args.path.exists():
        raise BadInput(f"{args.path} is there already: name a directory that is not")
    make_wide(args.path)
    say(f"made {args.path}: publish it with `lambdascale model add {args.path}`")
    return 0


async def _list(args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        models = await ask(bus, subjects.REGISTRY_MODELS, ModelsQuery(), Models)
        fixed = {} if args.json else await _fixed(bus)
    if args.json:
        print_json(models.records)
        return 0
    if not models.records:
        say("no models: publish one with `lambdascale model add PATH`")
        return 0
    rows = [
        {
            "name": record.name,
            "MB": f"{record.nbytes / 1e6:.1f}",
            "blocks": record.n_blocks,
            "instances": wanted(record.min_instances, record.max_instances, fixed.get(record.name)),
            "rules": rules(msgspec.to_builtins(record)),
            "id": record.model_id,
        }
        for record in models.records
    ]
    print_table(console(), "models", rows)
    return 0


async def _fixed(bus: Bus) -> dict[ModelName, int | None]:
    """What operators keep models at; nothing if the planner does not say."""
    try:
        planner = await ask(bus, subjects.PLANNER_STATE, PlannerQuery(events=0), PlannerState)
    except BusError as error:
        say(f"lambdascale: {error}")
        return {}
    return {found.name: found.fixed for found in planner.sets}


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
        return 0
    if reply.event:
        sys.stdout.write(f"{reply.event}\n")
    say(scaled(args.name, args.instances))
    return 0


def scaled(name: str, instances: int | None) -> str:
    """What `scale` did."""
    if instances is None:
        return f"{name}: the autoscaler decides again"
    until = f"until `lambdascale scale {name} --instances auto`"
    if instances == 0:
        return f"{name}: kept at 0 instances, and its requests are refused, {until}"
    return f"{name}: kept at {instances} instance{'s' if instances > 1 else ''} {until}"
