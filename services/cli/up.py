"""`lambdascale up` and `down`: a whole cluster on this machine."""

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from services.cli import processes
from services.cli.client import DEFAULT_DATA, absolute, connect, say
from services.cli.cluster import Cluster, ClusterSpec
from services.cli.models import import_model
from shared.config import load
from shared.errors import BadInput
from shared.ids import ModelName

WATCH_S = 0.5
DATA = "directory of the cluster: logs, stores, traces, state (default: %(default)s)"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    up = commands.add_parser(
        "up",
        help="start a cluster on this machine",
        description="Starts nats-server, registry, planner, gateway and N nodes on this machine, "
        "and keeps them until Ctrl-C (or, with --detach, until `lambdascale down`).",
    )
    up.add_argument("--nodes", type=int, default=3, metavar="N", help="default: %(default)s")
    up.add_argument("--model", type=absolute, metavar="PATH", help="publish this checkpoint too")
    up.add_argument("--name", help="what to call the model (default: its directory's name)")
    up.add_argument("--port", type=int, default=8000, help="of the gateway; 0: any free one")
    up.add_argument("--detach", action="store_true", help="return when everything is ready")
    up.add_argument("--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help=DATA)
    up.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
    up.set_defaults(run=run_up, nats=None)
    down = commands.add_parser(
        "down",
        help="end the cluster on this machine",
        description="Ends every process of the cluster, also after a crash.",
    )
    down.add_argument("--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help=DATA)
    down.set_defaults(run=run_down)


def run_up(args: argparse.Namespace) -> int:
    if not 1 <= args.nodes <= 64:
        raise BadInput(f"--nodes {args.nodes}: one machine carries 1 to 64")
    load(args.config)  # a mistake in it is told here, not in five logs
    return asyncio.run(_up(args))


def run_down(args: argparse.Namespace) -> int:
    count = processes.end_all(args.data)
    sys.stderr.write(f"{count} processes ended\n" if count else "nothing was running\n")
    return 0


async def _up(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    spec = ClusterSpec(
        directory=args.data, nodes=args.nodes, config=args.config, gateway_port=args.port
    )
    cluster = Cluster(spec)
    try:
        await _start(cluster, args)
        if args.detach:
            return 0
        say("Ctrl-C ends it")
        while not stop.is_set():
            for name, code in cluster.ended().items():
                say(f"{name} ended with {code}; see {args.data / 'logs' / name}.log")
            try:
                async with asyncio.timeout(WATCH_S):
                    await stop.wait()
            except TimeoutError:
                continue
    except BaseException:
        await cluster.stop()
        raise
    say("ending the cluster")
    await cluster.stop()
    return 0


async def _start(cluster: Cluster, args: argparse.Namespace) -> None:
    await cluster.start(say)
    say(f"ready: {cluster.state.gateway_url} (data in {args.data})")
    if args.model is None:
        say("publish a model: lambdascale model add PATH")
        return
    name = ModelName(args.name or args.model.name)
    async with connect(args) as bus:
        record = await import_model(bus, args.model, name, say=say)
    body = f'{{"model": "{record.name}", "prompt": "Hello", "max_tokens": 16}}'
    say(
        f"try it:\n  curl {cluster.state.gateway_url}/v1/completions "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
