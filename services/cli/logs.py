"""`lambdascale logs`: what the processes of a cluster on this machine have logged."""

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.cli.arguments import count
from services.cli.client import add_data_option
from services.local import processes
from shared.errors import NotFound

POLL_S = 0.2
TAIL_BYTES = 1 << 20
"""The most that is read of the end of a log."""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "logs",
        help="show what the processes of a cluster on this machine have logged",
        description="Prints the last lines of each process's log; with --follow also what comes. "
        "Under systemd it is `journalctl -u 'lambdascale-*'`, in containers `docker compose logs`.",
    )
    parser.add_argument(
        "name", nargs="*", help="processes, such as planner or node-0 (default: all)"
    )
    parser.add_argument(
        "--lines", type=count, default=20, metavar="N",
        help="how many of the last lines of each (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--grep", metavar="TEXT", help="only lines with this text, such as an id")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until Ctrl-C")
    add_data_option(parser, "data directory of the cluster")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    logs = _logs(args.data, args.name)
    width = max(map(len, logs))
    ends: dict[str, int] = {}
    for name, path in logs.items():
        ends[name] = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, ends[name] - TAIL_BYTES))
            text = file.read(ends[name] - file.tell()).decode(errors="replace")
        lines = [line for line in text.splitlines() if not args.grep or args.grep in line]
        _print(name, lines[-args.lines :], width)
    while args.follow:
        sys.stdout.flush()
        time.sleep(POLL_S)
        for name, path in logs.items():
            lines, ends[name] = _new(path, ends[name])
            _print(name, (line for line in lines if not args.grep or args.grep in line), width)
    return 0


def _logs(data: Path, names: Sequence[str]) -> dict[str, Path]:
    """The log of each process, by its name. NotFound."""
    known = [process.name for process in processes.read_state(data).processes]
    found = {name: path for name in known if (path := processes.log_of(data, name)).exists()}
    if unknown := [name for name in names if name not in found]:
        raise NotFound(f"no log of {', '.join(unknown)} in {data}: there are {', '.join(found)}")
    if not found:
        raise NotFound(f"no logs in {data}")
    return {name: found[name] for name in names or found}


def _new(path: Path, end: int) -> tuple[list[str], int]:
    """The whole lines after `end`, and where they end. A log that is shorter has begun anew."""
    with path.open("rb") as file:
        file.seek(end if path.stat().st_size >= end else 0)
        whole, _, rest = file.read().rpartition(b"\n")
        return whole.decode(errors="replace").splitlines(), file.tell() - len(rest)


def _print(name: str, lines: Iterable[str], width: int) -> None:
    for line in lines:
        sys.stdout.write(f"{name:<{width}} | {line}\n")
