"""`lambdascale up` and `down`: a whole cluster on this machine."""

import argparse
import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from services.cli import hub
from services.cli.client import (
    DEFAULT_DATA,
    absolute,
    add_data_option,
    add_json_option,
    ended_by_signals,
    print_json,
    say,
)
from services.cli.status import processes_of
from services.local import processes, talking
from services.local.asking import ask
from services.local.cluster import Cluster, ClusterSpec, bus_config
from services.local.detaching import detached
from services.local.publishing import publish
from services.local.supervision import Supervisor
from shared import subjects
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.config import load
from shared.errors import BadInput, Conflict
from shared.ids import ModelName, check_model_name
from shared.messages.pool import Models, ModelsQuery
from shared.messages.scaling import ImportModel

ASK = ("/v1/completions", {"prompt": "Hello", "max_tokens": 16})
ASK_DEMO = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 64},
)
DATA = "directory of the cluster: logs, stores, traces, state"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    up = commands.add_parser(
        "up",
        help="start a cluster on this machine",
        description="Starts nats-server, registry, planner, gateway and N nodes on this machine, "
        "and keeps them until Ctrl-C (or, with --detach, until `lambdascale down`). A process that "
        "ends is started again, after a second at first and half a minute at most. Models that "
        "were published in the data directory before are served again.",
    )
    up.add_argument(
        "--nodes", type=int, default=3, metavar="N", help="how many nodes (default: %(default)s)"
    )
    up.add_argument(
        "--gateways", type=int, default=1, metavar="N",
        help="how many gateways; all but the first take any free port (default: %(default)s)",
    )  # fmt: skip
    up.add_argument(
        "--standbys", type=int, default=0, metavar="N",
        help="how many more planners, and as many registries, to run. They stand by, and take over "
        "within two seconds when the active process dies (default: %(default)s)",
    )  # fmt: skip
    up.add_argument(
        "--node-standbys", action="store_true",
        help="run a second process for each node. It has loaded everything but the weights, and "
        "takes over the node's weights when the node's process ends",
    )  # fmt: skip
    up.add_argument(
        "--nats-servers", type=int, default=1, metavar="N",
        help="how many nats-servers; three keep three copies of the cluster's state, and any one "
        "of them may die (default: %(default)s)",
    )  # fmt: skip
    up.add_argument(
        "--model", metavar=hub.FORMS,
        help="publish this checkpoint, as `model add` does (default: where no model was published "
        "before, a very small one that says English sentences, as `demo`)",
    )  # fmt: skip
    up.add_argument("--no-model", action="store_true", help="publish no model")
    hub.add_cache_option(up)
    up.add_argument("--name", help="what to call the model (default: its directory's name)")
    port = "the gateway's port; 0: any free port (default: gateway.port, 8000)"
    up.add_argument("--port", type=int, metavar="N", help=port)
    up.add_argument(
        "--detach", action="store_true",
        help="return when everything is ready; a process in the background keeps the cluster, and "
        "logs to DIR/logs/up.log",
    )  # fmt: skip
    add_data_option(up, DATA)
    up.add_argument("--config", type=absolute, metavar="FILE", help="configuration (TOML)")
    add_json_option(up)
    up.set_defaults(run=run_up)
    down = commands.add_parser(
        "down",
        help="end the cluster on this machine",
        description="Ends every process of the cluster, also after a crash or while `up` starts "
        "it. Published models stay in the data directory.",
    )
    add_data_option(down, DATA)
    add_json_option(down)
    down.set_defaults(run=run_down)


def run_up(args: argparse.Namespace) -> int:
    """What can be wrong is told before anything starts."""
    if not 1 <= args.nodes <= 64:
        raise BadInput(f"--nodes {args.nodes}: one machine carries 1 to 64")
    if not 1 <= args.gateways <= 16:
        raise BadInput(f"--gateways {args.gateways}: use 1 to 16")
    if not 0 <= args.standbys <= 4:
        raise BadInput(f"--standbys {args.standbys}: use 0 to 4")
    if args.nats_servers not in (1, 3, 5):
        raise BadInput(
            f"--nats-servers {args.nats_servers}: use 1, 3 or 5 (an even number outlives no more "
            "deaths than the odd number before it)"
        )
    if args.port is not None and not 0 <= args.port <= 65535:
        raise BadInput(f"--port {args.port}: use 0 to 65535")
    if args.name is not None and args.model is None:
        raise BadInput("--name names the model of --model PATH, which is missing")
    if args.no_model and args.model is not None:
        raise BadInput("--model and --no-model exclude each other")
    if args.model is not None:
        args.name = check_model_name(args.name or hub.name_of(args.model))
    config = load(args.config).gateway
    processes.check_free(args.data)
    check_port(config.host, config.port if args.port is None else args.port)
    if args.model is not None:
        args.model = hub.local(args.model, args.cache)
        if not (args.model / "config.json").is_file():
            raise BadInput(f"--model {args.model}: not a checkpoint directory (no config.json)")
    if not args.detach:
        return asyncio.run(_up(args, lambda: say("Ctrl-C ends it"), say))
    log = processes.log_of(args.data, "up").absolute()
    return detached(lambda ready: asyncio.run(_up(args, lambda: ready(log), say_with_time)))


def check_port(host: str, port: int) -> None:
    """Conflict if the gateway cannot have it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise Conflict(
            f"the gateway cannot listen at {host}:{port} ({error.strerror}): choose another port "
            "with --port N (0: any free one)"
        ) from error


def run_down(args: argparse.Namespace) -> int:
    count = processes.end_all(args.data)
    if args.json:
        print_json({"ended": count})
    else:
        ended = "1 process ended" if count == 1 else f"{count} processes ended"
        say(ended if count else f"nothing was running in {args.data}")
    return 0


async def _up(
    args: argparse.Namespace, ready: Callable[[], None], tell: Callable[[str], None]
) -> int:
    """`ready` is called when all is up; what happens to the cluster from then on goes to `tell`."""
    spec = ClusterSpec(
        directory=args.data,
        nodes=args.nodes,
        gateways=args.gateways,
        standbys=args.standbys,
        node_standbys=args.node_standbys,
        nats_servers=args.nats_servers,
        config=args.config,
        gateway_port=args.port,
        ends_by_signal=True,
    )
    cluster = Cluster(spec)
    with ended_by_signals():
        try:
            await _start(cluster, args)
            ready()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                say("interrupted: ending what was started")
            await cluster.stop()
            raise
        try:
            await Supervisor(cluster, tell).run()
        except asyncio.CancelledError:
            tell("ending the cluster")
        finally:
            await cluster.stop()
    return 0


async def _start(cluster: Cluster, args: argparse.Namespace) -> None:
    await cluster.start(say)
    url = cluster.state.gateway_url
    say(f"ready: {', '.join(cluster.state.gateway_urls)} (data in {args.data})")
    async with NatsBus(bus_config(cluster.state), "cli") as bus:
        name = await _publish(bus, args)
    if name is None:
        data = "" if args.data == DEFAULT_DATA else f" --data {args.data}"
        say(f"publish a model: lambdascale model add PATH{data}")
    else:
        key = '-H "Authorization: Bearer $KEY" ' if load(args.config).gateway.api_keys else ""
        path, asked = ASK_DEMO if name == talking.NAME else ASK
        body = json.dumps({"model": name} | asked)
        say(f"try it:\n  curl {url}{path} {key}-H 'Content-Type: application/json' -d '{body}'")
    if args.json:
        print_json(
            {
                "gateway_url": url,
                "gateway_urls": cluster.state.gateway_urls,
                "nats_url": cluster.state.nats_url,
                "data": str(args.data.absolute()),
                "processes": processes_of(cluster.state),
            }
        )


async def _publish(bus: Bus, args: argparse.Namespace) -> ModelName | None:
    """The name of a model that can be asked: what --model names, or else what was published before,
    or else the demo's."""
    if args.model is not None:
        await publish(bus, ImportModel(path=str(args.model), name=args.name), say=say)
        return ModelName(args.name)
    if known := (await ask(bus, subjects.REGISTRY_MODELS, ModelsQuery(), Models)).records:
        return known[0].name
    if args.no_model:
        return None
    request = ImportModel(path=str(talking.CHECKPOINT), name=talking.NAME)
    await publish(bus, request, say=say)
    return talking.NAME


def say_with_time(text: str) -> None:
    """Says it as a line of a log."""
    say(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
