"""`lambdascale doctor`: what on this machine is wrong, or could be better, and what to do."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.client import DEFAULT_DATA, add_data_option, add_json_option, print_json
from services.cli.status_text import console
from services.local.checkup import Finding, Machine, State, check_up
from shared.config import load

COLOURS = {State.WELL: "green", State.LACKS: "yellow", State.WRONG: "red"}


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what on this machine is wrong, and what to do about it",
        description="Looks at this machine: nats-server, compiler, clock, memory, disk, limits, "
        "ports, network, GPUs and RDMA adapters. Changes nothing. Exits with 1 if something is "
        "wrong.",
    )
    add_data_option(parser, "directory whose disk is tried")
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (TOML)")
    add_json_option(parser)
    parser.set_defaults(run=run, data=DEFAULT_DATA)


def run(args: argparse.Namespace) -> int:
    found = list(check_up(Machine(load(args.config), args.data.absolute())))
    if args.json:
        print_json({"findings": [{**asdict(each), "state": each.state.value} for each in found]})
    else:
        _print(found)
    return 1 if any(each.state is State.WRONG for each in found) else 0


def _print(found: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for each in found:
        colour = COLOURS[each.state]
        state = f"[{colour}]{each.state.value}[/]"
        table.add_row(state, each.what, each.found, each.advice)
    console().print(table)
