"""`lambdascale up` and `down`: a whole cluster on this machine."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from services.cli.client import (
    absolute,
    add_data_option,
    add_json_option,
    ended_by_signals,
    print_json,
    say,
)
from services.cli.status import processes_of
from services.local import processes
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.publishing import publish
from shared.bus.nats import NatsBus
from shared.config import load
from shared.errors import BadInput, LambdaScaleError
from shared.ids import ModelName, check_model_name

WATCH_S = 0.5
DATA = "directory of the cluster: logs, stores, traces, state"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    up = commands.add_parser(
        "up",
        help="start a cluster on this machine",
        description="Starts nats-server, registry, planner, gateway and N nodes on this machine, "
        "and keeps them until Ctrl-C (or, with --detach, until `lambdascale down`). What was "
        "published in the data directory before is served again.",
    )
    up.add_argument("--nodes", type=int, default=3, metavar="N", help="default: %(default)s")
    up.add_argument("--model", type=absolute, metavar="PATH", help="publish this checkpoint too")
    up.add_argument("--name", help="what to call the model (default: its directory's name)")
    port = "of the gateway; 0: any free one (default: the configured one, 8000)"
    up.add_argument("--port", type=int, metavar="N", help=port)
    up.add_argument("--detach", action="store_true", help="return when everything is ready")
    add_data_option(up, DATA)
    up.add_argument("--config", type=absolute, metavar="FILE", help="configuration (TOML)")
    add_json_option(up)
    up.set_defaults(run=run_up)
    down = commands.add_parser(
        "down",
        help="end the cluster on this machine",
        description="Ends every process of the cluster, also after a crash, or while `up` is at "
        "work. What is published stays in the data directory.",
    )
    add_data_option(down, DATA)
    add_json_option(down)
    down.set_defaults(run=run_down)


def run_up(args: argparse.Namespace) -> int:
    """What can be wrong is told before anything starts."""
    if not 1 <= args.nodes <= 64:
        raise BadInput(f"--nodes {args.nodes}: one machine carries 1 to 64")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise BadInput(f"--port {args.port}: use 0 to 65535")
    if args.name is not None and args.model is None:
        raise BadInput("--name names the model of --model PATH, which is missing")
    if args.model is not None:
        check_model_name(args.name or args.model.name)
        if not (args.model / "config.json").is_file():
            raise BadInput(f"--model {args.model}: not a checkpoint directory (no config.json)")
    load(args.config)
    return asyncio.run(_up(args))


def run_down(args: argparse.Namespace) -> int:
    count = processes.end_all(args.data)
    if args.json:
        print_json({"ended": count})
    else:
        ended = "1 process ended" if count == 1 else f"{count} processes ended"
        say(ended if count else f"nothing was running in {args.data}")
    return 0


async def _up(args: argparse.Namespace) -> int:
    cluster = Cluster(
        ClusterSpec(
            directory=args.data,
            nodes=args.nodes,
            config=args.config,
            gateway_port=args.port,
            detached=args.detach,
            launcher=True,
        )
    )
    with ended_by_signals():
        try:
            await _start(cluster, args)
            return 0 if args.detach else await _stay(cluster, args.data)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                say("interrupted: ending what was started")
            await cluster.stop()
            raise


async def _start(cluster: Cluster, args: argparse.Namespace) -> None:
    await cluster.start(say)
    url = cluster.state.gateway_url
    say(f"ready: {url} (data in {args.data})")
    if args.model is not None:
        name = ModelName(args.name or args.model.name)
        async with NatsBus(bus_config(cluster.state), "cli") as bus:
            await publish(bus, args.model, name, say=say)
        key = '-H "Authorization: Bearer $KEY" ' if load(args.config).gateway.api_keys else ""
        body = f'{{"model": "{name}", "prompt": "Hello", "max_tokens": 16}}'
        say(
            f"try it:\n  curl {url}/v1/completions {key}-H 'Content-Type: application/json' "
            f"-d '{body}'"
        )
    else:
        say("publish a model: lambdascale model add PATH")
    if args.json:
        print_json(
            {
                "gateway_url": url,
                "nats_url": cluster.state.nats_url,
                "data": str(args.data.absolute()),
                "processes": processes_of(cluster.state),
            }
        )


async def _stay(cluster: Cluster, data: Path) -> int:
    """Until a signal, or until the bus is gone, without which nothing can be mended."""
    say("Ctrl-C ends it")
    try:
        while True:
            await asyncio.sleep(WATCH_S)
            ended = cluster.ended()
            for name, code in ended.items():
                say(f"{name} ended with {code}; see {processes.log_of(data, name)}")
            if processes.NATS in ended:
                raise LambdaScaleError("the cluster cannot go on without its bus and was ended")
    except asyncio.CancelledError:
        say("ending the cluster")
    await cluster.stop()
    return 0
