"""`lambdascale gateway|planner|registry|node`: one service, until SIGINT or SIGTERM."""

import argparse
import faulthandler
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from shared import telemetry
from shared.bus.base import Bus
from shared.bus.nats import NatsBus
from shared.config import Config, load
from shared.lasting import lasting
from shared.service import Service, log_what_nobody_awaits, serve_until_signal

HAND_OVER_S = 0.0005
"""How long a thread that computes may keep the others of its process waiting: they plan, move bytes
and answer. Python's own choice is ten times that."""
HUNG_S = 5
"""How long a node whose engine hangs has to end in good order."""
FEW_FILES = 4096
"""Open files; each connection of a client, a peer or NATS is one."""
HELP = {
    "gateway": "HTTP in, OpenAI-style; routes requests over instances",
    "planner": "decides on instances, plans and watches scaling events",
    "registry": "knows models, nodes and which block lies where",
    "node": "holds blocks, moves them and runs them",
}


def _gateway(bus: Bus, config: Config) -> Service:
    from services.gateway.service import GatewayService

    return GatewayService(bus, config.gateway)


def _planner(bus: Bus, config: Config) -> Service:
    from services.planner.service import PlannerService

    return PlannerService(bus, config.planner)


def _registry(bus: Bus, config: Config) -> Service:
    from services.registry.service import RegistryService

    return RegistryService(bus, config.registry)


def _node(bus: Bus, config: Config) -> Service:
    from services.node.real_parts import RealParts  # imports torch: a second
    from services.node.service import NodeService

    if elsewhere := buses_elsewhere(config):
        telemetry.logger("node", name=config.node.id).warning(
            "nodes of other machines cannot reach this one: set node.host to an address, or a name "
            "of one, that they know",
            host=config.node.host,
            bus=elsewhere,
        )
    shares = config.node.share_compiled and bool(config.bus.credentials)
    return NodeService(
        bus,
        config.node,
        RealParts(config.node),
        keep_s=config.node.keep_weights_s,
        shares_compiled=shares,
        hung=_end_in_any_case,
    )


def _end_in_any_case() -> None:
    """Ends the process after a while, even if what hangs keeps it from ending in good order. Before
    that it writes where each thread is."""
    faulthandler.dump_traceback_later(HUNG_S, exit=True)


def buses_elsewhere(config: Config) -> list[str]:
    """Hosts of the bus that are not this machine, where the node can be reached from here only."""
    hosts = [urlsplit(url).hostname or "" for url in config.bus.url.split(",")]
    if not _is_loopback(config.node.host):
        return []
    return [host for host in hosts if host and not _is_loopback(host)]


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def raise_open_files() -> None:
    """Lets the process have as many open files as its hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


MAKERS: dict[str, Callable[[Bus, Config], Service]] = {
    "gateway": _gateway,
    "planner": _planner,
    "registry": _registry,
    "node": _node,
}


def is_asked_for(argv: Sequence[str]) -> bool:
    """Whether the command line names a service to run."""
    return bool(argv) and argv[0] in HELP and (len(argv) == 1 or argv[1].startswith("--config"))


def add_parsers(
    commands: "argparse._SubParsersAction[Any]",
) -> dict[str, argparse.ArgumentParser]:
    """The parser of each service, by its name."""
    parsers = {}
    for role, text in HELP.items():
        parser = commands.add_parser(
            role,
            help=f"run one {role}: {text}",
            description=f"Runs one {role} until SIGINT or SIGTERM: {text}. Its settings are the "
            f"table [{role}] of the configuration, or LAMBDASCALE_{role.upper()}_<KEY>.",
        )
        parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
        parser.set_defaults(run=run, role=role)
        parsers[role] = parser
    return parsers


def run(args: argparse.Namespace) -> int:
    config = load(args.config)
    raise_open_files()
    sys.setswitchinterval(HAND_OVER_S)
    uvloop.run(_run(args.role, config))
    return 0


async def _run(role: str, config: Config) -> None:
    name = {"gateway": config.gateway.name, "node": config.node.id}.get(role, role)
    telemetry.configure(name, config.telemetry)
    log_what_nobody_awaits(telemetry.logger(role, name=name))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FEW_FILES:
        telemetry.logger(role, name=name).warning(
            "few open files allowed: connections beyond them are refused",
            limit=files,
            mend=f"raise the hard limit to {FEW_FILES} or more: ulimit -Hn, LimitNOFILE=",
        )
    try:
        async with NatsBus(config.bus, name) as bus, AsyncExitStack() as shown:
            with lasting():
                service = MAKERS[role](bus, config)
            await _show(service, bus, config, shown)
            await serve_until_signal(service)
    finally:
        telemetry.shutdown()


async def _show(service: Service, bus: NatsBus, config: Config, shown: AsyncExitStack) -> None:
    """Has the process show how it is until `shown` closes: gateways at their own port, others where
    a port is configured."""
    own = {
        "planner": config.planner.metrics_port,
        "registry": config.registry.metrics_port,
        "node": config.node.metrics_port,
    }
    port = own.get(service.role, 0)
    if service.role in own and not port:
        return
    with lasting():  # imported here, because most processes of a cluster on one machine need none
        from shared.monitor import monitoring
        from shared.vitals import Vitals

        metrics = service.metrics()
        vitals = Vitals(metrics, service, bus)
    service.spawn(vitals.watch_loop(), name="vitals", contained=True)
    if port:
        host, wrong = config.telemetry.metrics_host, lambda: _wrong(service, bus)
        await shown.enter_async_context(monitoring(host, port, metrics, wrong, service.log))


def _wrong(service: Service, bus: NatsBus) -> str:
    """What keeps the service from its work; empty: nothing."""
    if not bus.is_up:
        return "not connected to NATS"
    return "" if service.ready or service.stands_by else "starting or ending"
