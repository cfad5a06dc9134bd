"""`lambdascale node cordon|uncordon|drain`: what a node may be used for."""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from services.cli.client import add_cluster_options, connect, say
from services.local.asking import TIMEOUT_S, ask
from shared import subjects
from shared.bus.base import Bus
from shared.errors import CapacityExceeded, NotFound
from shared.ids import NodeId
from shared.messages.copies import CopiesQuery, PoolCopies
from shared.messages.pool import MEMORY, Duty, Nodes, SetDuty
from shared.pool_pages import read_pool

POLL_S = 0.5
GRACE_S = 10.0
"""Seconds that the node has after the deadline to free its memory."""
DRAIN_DESCRIPTION = """\
Empties a node: it is given nothing new, other nodes take over the models that it serves before it
lets go of them, and the copies that only its machine keeps are made elsewhere. Returns when nothing
is left, with exit code 0; the node then runs on, empty, until it is stopped or `uncordon`ed.

Where no other node has room, the node serves on. With --deadline it ends then what it serves, and
requests that run there go on elsewhere or wait. Ctrl-C ends the command, and not the drain.
"""


def add_parsers(node: argparse.ArgumentParser) -> None:
    actions = node.add_subparsers(title="operating a node", metavar="ACTION")
    cordon = actions.add_parser(
        "cordon",
        help="give a node nothing new; it serves what it has",
        description="From now on the node is given nothing new. It serves what it has.",
    )
    uncordon = actions.add_parser(
        "uncordon",
        help="use a node for all again",
        description="Takes back `cordon` or `drain`.",
    )
    drain = actions.add_parser(
        "drain",
        help="empty a node, so that it can be stopped",
        description=DRAIN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drain.add_argument(
        "--deadline",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="when the node ends what it serves in any case (default: there is no such time)",
    )
    for parser, run in ((cordon, _cordon), (uncordon, _uncordon), (drain, _drain)):
        parser.add_argument("node", metavar="NODE", help="the node's id, as `status` shows it")
        add_cluster_options(parser)
        parser.set_defaults(run=partial(_run, run))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


Act = Callable[[Bus, argparse.Namespace], Awaitable[int]]


def _run(act: Act, args: argparse.Namespace) -> int:
    return asyncio.run(_connected(act, args))


async def _connected(act: Act, args: argparse.Namespace) -> int:
    async with connect(args) as bus:
        return await act(bus, args)


async def _cordon(bus: Bus, args: argparse.Namespace) -> int:
    await _set(bus, args.node, Duty.CORDONED)
    say(f"{args.node} is given nothing new")
    return 0


async def _uncordon(bus: Bus, args: argparse.Namespace) -> int:
    await _set(bus, args.node, Duty.ALL)
    say(f"{args.node} is used for all again")
    return 0


async def _set(bus: Bus, node: str, duty: Duty, within_s: float = 0.0) -> None:
    wish = SetDuty(node=NodeId(node), duty=duty, within_s=within_s)
    await ask(bus, subjects.REGISTRY_DUTY, wish, Nodes)


async def _drain(bus: Bus, args: argparse.Namespace) -> int:
    await _set(bus, args.node, Duty.DRAINING, args.deadline)
    began, told = time.monotonic(), ""
    while left := await _left(bus, NodeId(args.node)):
        took_s = time.monotonic() - began
        if args.deadline and took_s > args.deadline + GRACE_S:
            raise CapacityExceeded(f"{args.node} is not empty after {took_s:.0f} s: it {left}")
        if left != told:
            say(f"{args.node} {left}")
            told = left
        await asyncio.sleep(POLL_S)
    say(f"{args.node} is empty, after {time.monotonic() - began:.1f} s")
    return 0


async def _left(bus: Bus, node: NodeId) -> str:
    """What the node still has that others shall have, in words; empty: nothing."""
    pool = await read_pool(partial(bus.request, timeout=TIMEOUT_S))
    view = next((view for view in pool.nodes if view.info.node == node), None)
    if view is None:
        raise NotFound(f"{node} is gone")
    copies = await ask(bus, subjects.REGISTRY_COPIES, CopiesQuery(), PoolCopies)
    held = {holding.model_id for holding in view.holdings if holding.tier in MEMORY}
    in_memory = [model.name for model in copies.models if model.model_id in held]
    alone = [m.name for m in copies.models if {durable.node for durable in m.durable} == {node}]
    parts = []
    if in_memory:
        parts.append(f"has in memory: {', '.join(in_memory)}")
    if alone:
        parts.append(f"has the only durable copy of: {', '.join(alone)}")
    return "; ".join(parts)
