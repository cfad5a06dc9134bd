"""`lambdascale plan`: a multicast schedule on paper, for people, for a checker, or as a picture."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from services.cli import plan_explain, plan_text, plan_ways
from services.cli.arguments import amount, amounts, count, counts, whole
from services.cli.plan_text import Plan
from services.node.checkpoints.packing import chunk_bytes
from services.planner.core import kv_traffic
from services.planner.core.choose import AUTO, Choice, choose, units
from services.planner.core.kv_traffic import Flow, left
from services.planner.core.multicast.fabric import Fabric, Port, Task
from services.planner.core.multicast.strategies import STRATEGIES
from services.planner.core.outlook import Serving
from services.planner.core.placement import why_used
from services.planner.core.ways import Chosen
from shared.config import PlannerConfig
from shared.errors import BadInput, CapacityExceeded, PlanError
from shared.parts import Part


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "plan",
        help="show the multicast schedule for a cluster of this size",
        description="Shows the schedule that takes a model's blocks from the first K nodes to all "
        "N, compared with the lower bound, and what can serve after each step. With rates it also "
        "shows how long that takes, on unequal links too.",
    )
    parser.add_argument(
        "--nodes", type=count, required=True, help="number of nodes, N, sources included"
    )
    parser.add_argument("--blocks", type=count, required=True, help="number of blocks of the model")
    parser.add_argument(
        "--sources",
        type=count,
        default=1,
        help="number of nodes that hold the model at first, K (1)",
    )
    parser.add_argument(
        "--algorithm",
        choices=[AUTO, *STRATEGIES],
        default=AUTO,
        help="auto: the best for these links, with the best number of blocks for each move",
    )
    _add_links(parser.add_argument_group("links (10^6 bits a second)"))
    plan_ways.add_options(parser)
    form = parser.add_argument_group("form")
    form.add_argument("--explain", action="store_true", help="show what was chosen, and why")
    form.add_argument("--json", action="store_true", help="print only the schedule, as JSON")
    form.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule")
    form.add_argument("--png", type=Path, metavar="FILE", help="draw the schedule")
    parser.set_defaults(run=run)


def _add_links(links: "argparse._ArgumentGroup") -> None:
    links.add_argument("--size-mb", type=amount, help="size of the model, 10^6 bytes")
    links.add_argument(
        "--arena-mb",
        type=amount,
        help="room for weights on every node, 10^6 bytes: a model that fits on none is cut into "
        "parts, and the plan is that of one part",
    )
    links.add_argument(
        "--link-mbit", type=amount, help="rate of every node's port in each direction"
    )
    links.add_argument("--rates", type=amounts, metavar="R,R,..", help="rate of each node's port")
    links.add_argument(
        "--overhead-ms",
        type=amount,
        help="alpha: what a hop, or a change of partners, costs (default: the planner's)",
    )
    links.add_argument(
        "--whole-blocks",
        action="store_true",
        help="relays forward only complete blocks (the papers' model) instead of chunks as they "
        "arrive (of the size that importing the model would give them)",
    )
    links.add_argument(
        "--racks", type=counts, metavar="N,N,..", help="number of nodes of each rack"
    )
    links.add_argument("--trunk-mbit", type=amount, help="rate of a rack's trunk in each direction")
    links.add_argument("--hosts", type=count, metavar="N", help="number of nodes of each host")
    links.add_argument("--local-mbit", type=amount, help="rate between nodes of one host")
    links.add_argument(
        "--receive-only",
        type=_indices,
        metavar="I,I,..",
        default=(),
        help="numbers of the nodes that send nothing",
    )
    links.add_argument(
        "--kv-mbit",
        type=amount,
        help="rate of the KV that leaves each node of --prefill, and comes to those of --decode",
    )
    for role in ("prefill", "decode"):
        links.add_argument(
            f"--{role}",
            type=_indices,
            metavar="I,I,..",
            default=(),
            help=f"numbers of the nodes that {role} meanwhile",
        )


def run(args: argparse.Namespace) -> int:
    """Prints or draws the plan. BadInput for arguments that do not fit together; CapacityExceeded
    if the model does not even fit on all nodes together."""
    way = _way(args)
    parts = way.way.parts if way else (Part(0, args.blocks),)
    plan = _plan(args, parts)
    if way and len(parts) > 1 and not args.json:
        print("\n".join(_groups(args, way)))
    if args.svg or args.png:
        from services.cli import plan_figure  # matplotlib takes a second to load

        for path in (args.svg, args.png):
            if path is not None:
                plan_figure.draw(plan, path)
    if args.json:
        print(json.dumps(plan_text.document(plan.schedule, plan.choice.unit)))
    elif args.explain:
        print("\n".join(plan_explain.report(plan)))
    elif not (args.svg or args.png):
        print("\n".join(plan_text.report(plan)))
    return 0


def _way(args: argparse.Namespace) -> Chosen | None:
    """The parts that devices get, and who runs them. None: each node gets all."""
    if args.arena_mb is None:
        if args.step or args.step_together or args.layers:
            raise BadInput("--step, --step-together and --layers need --arena-mb")
        return None
    if args.size_mb is None or args.link_mbit is None or args.racks or args.hosts:
        raise BadInput("--arena-mb needs --size-mb and --link-mbit, without --racks and --hosts")
    found = plan_ways.chosen(args, _sizes(args))
    if found is None:
        raise CapacityExceeded(
            f"the model takes {args.size_mb:g} MB in blocks of {max(_sizes(args)) / 1e6:.1f} MB, "
            f"and {args.nodes} nodes have room for {args.arena_mb:g} MB each"
        )
    count = len(found.way.parts)
    if args.sources % count or args.nodes % count:
        raise BadInput(
            f"a group has {count} nodes here: give multiples of that to --nodes and --sources"
        )
    return found


def _groups(args: argparse.Namespace, found: Chosen) -> Iterator[str]:
    parts = found.way.parts
    sizes, count = _sizes(args), len(parts)
    shares = (f"{p} ({sum(sizes[p.start : p.stop]) / 1e6:.1f} MB)" for p in parts)
    yield f"the model fits on no node: groups of {count} nodes serve it, with {', '.join(shares)}"
    if found.why:
        yield f"they run: {found.why}"
    yield (
        f"each part goes from {args.sources // count} to {args.nodes // count} nodes, beside the "
        "others; the plan for the largest:"
    )
    yield ""


def _plan(args: argparse.Namespace, parts: Sequence[Part]) -> Plan:
    if args.sources > args.nodes:
        raise BadInput(f"--sources {args.sources} is more than --nodes {args.nodes}")
    task, choice, ports = _chosen(args, parts)
    timed = args.size_mb is not None
    return Plan(task, units(task, choice.unit), choice, timed=timed, ports=ports)


def _chosen(
    args: argparse.Namespace, parts: Sequence[Part]
) -> tuple[Task, Choice, tuple[str, ...]]:
    """The plan, with what KV does to ports. A node whose way out KV takes sends weights only if
    there is no other source, or the others are much slower (`placement`)."""
    kv = _kv(args)
    whole = _of_part(_task(args), parts)
    for node in kv:
        if node >= whole.nodes:
            raise BadInput(f"--prefill, --decode: there is no node {node}")
    used, spared = (_beside(whole, kv, spares=spares) for spares in (False, True))
    serving = Serving(PlannerConfig().max_stages)
    taken = [
        node for node in kv if used.fabric.ports[node].out and not spared.fabric.ports[node].out
    ]

    def words(spares: bool, why: str = "") -> tuple[str, ...]:
        known = [
            said
            for node, flow in kv.items()
            for said in kv_traffic.words(
                f"node {node}",
                flow,
                out=whole.fabric.ports[node].out,
                into=whole.fabric.ports[node].into if node in whole.destinations else 0.0,
                spares=spares,
            )
        ]
        return (*known, why) if why else tuple(known)

    choice = choose(used, serving, name=args.algorithm)
    if not taken:
        return used, choice, words(spares=False)
    names = [f"node {node}" for node in taken]
    try:
        found = choose(spared, serving, name=args.algorithm)
    except PlanError:
        return used, choice, words(spares=False, why=f"nobody but {', '.join(names)} can send it")
    why = why_used(names, found.outlook.all_complete_s, choice.outlook.all_complete_s)
    if why:
        return used, choice, words(spares=False, why=why)
    return spared, found, words(spares=True)


def _kv(args: argparse.Namespace) -> dict[int, Flow]:
    """The KV at the ports of nodes that have any."""
    if not args.kv_mbit:
        if args.prefill or args.decode:
            raise BadInput("--prefill and --decode need --kv-mbit")
        return {}
    if not (args.prefill and args.decode and args.size_mb):
        raise BadInput("--kv-mbit needs --prefill, --decode and --size-mb")
    if both := set(args.prefill) & set(args.decode):
        raise BadInput(
            f"nodes {sorted(both)} are of --prefill and of --decode: one of them, please"
        )
    out = _bytes_per_s(args.kv_mbit)
    into = out * len(args.prefill) / len(args.decode)
    return dict.fromkeys(args.prefill, Flow(out=out)) | dict.fromkeys(args.decode, Flow(into=into))


def _beside(task: Task, kv: Mapping[int, Flow], *, spares: bool) -> Task:
    """The task on what KV leaves of ports. `spares`: see `kv_traffic.left`."""
    ports = list(task.fabric.ports)
    for node, flow in kv.items():
        port = ports[node]
        ports[node] = replace(
            port,
            out=left(port.out, flow.out, spares=spares),
            into=left(port.into, flow.into, spares=False),
        )
    return replace(task, fabric=replace(task.fabric, ports=tuple(ports)))


def _of_part(task: Task, parts: Sequence[Part]) -> Task:
    """The task for the largest part, if there are several."""
    if len(parts) > 1:
        part = max(parts, key=lambda p: sum(task.block_bytes[p.start : p.stop]))
        ports = task.fabric.ports[: task.nodes // len(parts)]
        task = replace(
            task,
            fabric=replace(task.fabric, ports=ports),
            block_bytes=task.block_bytes[part.start : part.stop],
            sources=task.sources[: len(task.sources) // len(parts)],
        )
    return task


def _task(args: argparse.Namespace) -> Task:
    sources = tuple(range(args.sources))
    if args.size_mb is None:
        return Task(_step_fabric(args), (1,) * args.blocks, sources)
    nbytes = round(args.size_mb * 1e6)
    if nbytes < args.blocks:
        raise BadInput(f"--size-mb {args.size_mb:g} is less than a byte for each block")
    return Task(
        _fabric(args), _sizes(args), sources, 0 if args.whole_blocks else chunk_bytes(nbytes)
    )


def _sizes(args: argparse.Namespace) -> tuple[int, ...]:
    """Bytes of each block."""
    ends = [round(args.size_mb * 1e6) * i // args.blocks for i in range(args.blocks + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


def _step_fabric(args: argparse.Namespace) -> Fabric:
    """The step model's fabric: every port takes one block in a step."""
    for name in ("link_mbit", "rates", "racks", "trunk_mbit", "hosts", "local_mbit", "overhead_ms"):
        if getattr(args, name) is not None:
            raise BadInput(
                f"--{name.replace('_', '-')} needs --size-mb: "
                "rates and the size predict times together"
            )
    return Fabric(tuple(_ports(args, [1.0] * args.nodes)), 0.0)


def _fabric(args: argparse.Namespace) -> Fabric:
    if (args.link_mbit is None) == (args.rates is None):
        raise BadInput("--size-mb needs either --link-mbit or --rates, to predict times")
    _paired(args, "racks", "trunk_mbit")
    _paired(args, "hosts", "local_mbit")
    if args.rates is not None and len(args.rates) != args.nodes:
        raise BadInput(f"--rates names {len(args.rates)} rates for {args.nodes} nodes")
    rates = args.rates or [args.link_mbit] * args.nodes
    overhead_s = PlannerConfig().step_overhead_s
    if args.overhead_ms is not None:
        overhead_s = args.overhead_ms / 1e3
    ports = _ports(args, [_bytes_per_s(rate) for rate in rates])
    trunks = {port.rack: _bytes_per_s(args.trunk_mbit) for port in ports if port.rack}
    local = _bytes_per_s(args.local_mbit) if args.local_mbit else 0.0
    return Fabric(tuple(ports), overhead_s, trunks, local)


def _ports(args: argparse.Namespace, rates: Sequence[float]) -> list[Port]:
    racks = _rack_names(args.racks, args.nodes)
    for node in args.receive_only:
        if not args.sources <= node < args.nodes:
            raise BadInput(
                f"--receive-only {node}: "
                f"the nodes that receive are {args.sources}..{args.nodes - 1}"
            )
    return [
        Port(
            out=0.0 if node in args.receive_only else rate,
            into=rate,
            rack=racks[node],
            host=f"host {node // args.hosts}" if args.hosts else "",
        )
        for node, rate in enumerate(rates)
    ]


def _rack_names(sizes: Sequence[int] | None, nodes: int) -> list[str]:
    if sizes is None:
        return [""] * nodes
    if sum(sizes) != nodes:
        raise BadInput(f"--racks has {sum(sizes)} nodes, --nodes says {nodes}")
    return [f"rack {rack}" for rack, size in enumerate(sizes) for _ in range(size)]


def _paired(args: argparse.Namespace, one: str, other: str) -> None:
    if (getattr(args, one) is None) != (getattr(args, other) is None):
        names = " and ".join(f"--{name.replace('_', '-')}" for name in (one, other))
        raise BadInput(f"{names} go together: give both or neither")


def _bytes_per_s(mbit: float) -> float:
    return mbit * 1e6 / 8


def _indices(text: str) -> tuple[int, ...]:
    return tuple(whole(part) for part in text.split(","))
