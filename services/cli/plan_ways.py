"""`lambdascale plan --arena-mb`: who would run a model that fits on no node."""

import argparse
from collections.abc import Iterator, Sequence

from services.cli.arguments import amounts, count
from services.planner.core.cut import Room
from services.planner.core.ways import Chosen, Decoded, Device, choose
from shared.errors import BadInput
from shared.ids import NodeId
from shared.messages.pool import DecodeShape
from shared.step_costs import StepCosts

HOST = "one machine"
STEP = ("GB/s", "us a layer", "us a step")


def add_options(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_argument_group("who runs a model that fits on no node (with --arena-mb)")
    ways.add_argument(
        "--step",
        type=amounts,
        metavar="R,L,C",
        help="a decode step of one node: the rate at which it reads weights (10^9 bytes a second), "
        "and what a layer, and the call for a step, cost beside that (microseconds); nodes with "
        "node.team_devices above 1 measure that when they start, and log it",
    )
    ways.add_argument(
        "--step-together",
        type=amounts,
        metavar="R,L,C",
        help="the same where all nodes of a group run it together, which are on one machine",
    )
    ways.add_argument("--layers", type=count, metavar="N", help="layers of the model (blocks)")


def chosen(args: argparse.Namespace, sizes: Sequence[int]) -> Chosen | None:
    """None: the nodes have no room for the model, even all together. BadInput for arguments that do
    not fit together."""
    nbytes = round(args.arena_mb * 1e6)
    if args.step_together and not args.step:
        raise BadInput("--step-together needs --step, with which it is compared")
    host, alone = HOST if args.step_together else "", tuple(_costs(args.step, 1))
    rooms = [Room(NodeId(str(node)), host, nbytes) for node in range(args.nodes)]
    shape = DecodeShape(layers=args.layers or args.blocks, heads=1, itemsize=1, looked_up=0)
    model = Decoded(tuple(sizes), shape)
    found = choose(model, [Device(room, alone) for room in rooms])
    if found is None or not args.step_together:
        return found
    costs = (*alone, *_costs(args.step_together, len(found.way.parts)))
    return choose(model, [Device(room, costs) for room in rooms])


def _costs(step: Sequence[float] | None, devices: int) -> Iterator[StepCosts]:
    if step is None:
        return
    if len(step) != len(STEP):
        raise BadInput(f"--step and --step-together take three numbers: {', '.join(STEP)}")
    rate, layer, call = step
    yield StepCosts(1, rate * 1e9, layer / 1e6, call / 1e6, devices)
