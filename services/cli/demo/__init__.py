"""`lambdascale demo`: one load spike, served while the weights move, from start to end."""

import argparse
import sys
from typing import Any

from services.cli.client import absolute, add_json_option, print_json, say
from services.cli.demo.scenario import COPY_S, NODES, REQUESTS, STEP_FLOOR_S
from shared.errors import BadInput

DEFAULT_OUT = "demo-out"
MOST_REQUESTS = 1000
OUT = "directory for the figure, the page, the report, logs and traces (default: %(default)s)"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "demo",
        help="watch one load spike being served while the weights move",
        description=f"Starts a cluster of {NODES} nodes on this machine and makes a small model "
        "for one of them. Sends the cluster a burst of streaming requests, and shows how the "
        "planner spreads the model and how requests run over nodes that still load. Checks every "
        "token against those of a single complete node. Links are paced so that one copy takes "
        f"{COPY_S:.0f} s, and engines so that a step takes at least {STEP_FLOOR_S * 1e3:.0f} ms: "
        "so the nodes share this machine as if each had its own. Exits with 0 only if no request "
        "was lost, no token was wrong, and one instance was left in the end.",
    )
    parser.add_argument("--out", type=absolute, default=DEFAULT_OUT, metavar="DIR", help=OUT)
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        metavar="N",
        help="the burst's size (default: %(default)s)",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.requests <= MOST_REQUESTS:
        raise BadInput(f"--requests {args.requests}: use 1 to {MOST_REQUESTS}")
    say(f"{NODES} nodes, one model, one load spike; everything goes to {args.out}")
    # Here, since they import torch and matplotlib: two seconds that other commands don't need.
    from services.cli.demo.command import play
    from services.cli.demo.report import as_text, good

    report = play(args.out, args.requests)
    if args.json:
        print_json(report)
    else:
        sys.stdout.write(as_text(report) + "\n")
    return 0 if good(report) else 1
