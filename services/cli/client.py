"""What the operator's commands share: where the cluster is, how to reach its bus, how to print."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from services.cli.processes import ClusterState, read_state
from shared.bus.nats import NatsBus
from shared.config import load
from shared.errors import NotFound

DEFAULT_DATA = Path("lambdascale-data")


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        metavar="DIR",
        help="data directory of the cluster on this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration; its [bus] names a user"
    )
    parser.add_argument(
        "--nats", metavar="URL", help="bus of a cluster that `up` did not start, e.g. on servers"
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")


def state_of(args: argparse.Namespace) -> ClusterState:
    """The local cluster's state; an empty one when --nats points elsewhere."""
    if args.nats:
        return ClusterState(nats_url=args.nats)
    state = read_state(args.data)
    if not any(process.state == "running" for process in state.processes):
        raise NotFound(f"the cluster in {args.data} is not running: `lambdascale up` starts one")
    return state


def connect(args: argparse.Namespace) -> NatsBus:
    """A bus to the cluster that the options name (enter it)."""
    bus = load(args.config).bus
    return NatsBus(msgspec.structs.replace(bus, url=state_of(args).nats_url), "cli")


def absolute(text: str) -> Path:
    """An argument that names a path which another process will open."""
    return Path(text).absolute()


def say(text: str) -> None:
    """Tells the person at the terminal; standard output stays clean for programs."""
    sys.stderr.write(text + "\n")


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
