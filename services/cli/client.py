"""What the operator's commands share: finding the cluster, reaching its bus, printing."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.local.cluster import bus_config
from services.local.processes import NATS, ClusterState, read_state
from shared.bus.nats import NatsBus
from shared.config import load
from shared.errors import BusError, LambdaScaleError, NotFound

DEFAULT_DATA = Path("lambdascale-data")
BUS_VARIABLE = "LAMBDASCALE_BUS_URL"


def add_data_option(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        metavar="DIR",
        help=f"{text} (default: %(default)s)",
    )


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    add_data_option(parser, "data directory of a cluster that `up` started on this machine")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration of a cluster on servers, whose [bus] is used (a cluster of `up` needs "
        "none)",
    )
    parser.add_argument(
        "--nats",
        metavar="URL",
        help="address of the bus of a cluster on servers; --config says who you are there",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def state_of(args: argparse.Namespace) -> ClusterState:
    """The local cluster's state. It has no processes if the options name another bus."""
    if args.nats:
        return ClusterState(nats_url=args.nats)
    try:
        state = read_state(args.data)
        if state.running:
            return state
        raise NotFound(f"the cluster in {args.data} is not running: `lambdascale up` starts one")
    except LambdaScaleError:
        if args.config or BUS_VARIABLE in os.environ:
            return ClusterState(nats_url=load(args.config).bus.url)
        raise


def connect(args: argparse.Namespace) -> NatsBus:
    """A bus to the cluster that the options name. The caller enters it."""
    state = state_of(args)
    if not state.nats_url:
        raise NotFound(f"the cluster in {args.data} is starting")
    servers = [process for process in state.processes if process.role == NATS]
    if servers and all(server.state != "running" for server in servers):
        raise BusError(
            f"the nats-server of the cluster in {args.data} ended and is about to be started "
            "again: try again in a few seconds"
        )
    return NatsBus(bus_config(state, args.config), "cli")


def absolute(text: str) -> Path:
    """Makes an argument absolute that names a path which another process will open."""
    return Path(text).expanduser().absolute()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP cancel the current task.

    Once: a second Ctrl-C does not cut off the tidying up that the first one began. A SIGHUP that
    is ignored (`nohup`) stays so.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    told = False

    def tell() -> None:
        nonlocal told
        if task is not None and not told:
            told = True
            task.cancel()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, tell)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def silence_logs() -> None:
    """Silences the bus's own log lines, which are meant for services. A command says in words what
    failed."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def say(text: str) -> None:
    """Tells the person at the terminal; does nothing if it is gone. Standard output stays free
    for programs."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
    sys.stdout.flush()
