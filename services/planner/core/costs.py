"""How long moves take: closed forms for equal links, and arrival times on any fabric.

A block of s bytes takes tau = alpha + s / beta seconds from port to port: alpha (`overhead_s`) is
the fixed time of a transfer, beta the rate of the slowest thing it crosses. Both are measured. A
relay forwards a block while it receives it, delta = alpha + c / beta behind, for chunks of c bytes.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from services.planner.core.multicast.fabric import Fabric, Task
from services.planner.core.multicast.schedule import Move, Schedule
from services.planner.core.multicast.strategies import lower_bound

Arrivals = Mapping[tuple[int, int], float]
"""(node, block) -> seconds from the start of the multicast at which the block is there."""

EQUAL = 0.05
"""Rates and sizes that differ by less than this share are taken as the same."""


@dataclass(frozen=True)
class Link:
    bytes_per_s: float
    overhead_s: float


def multicast_seconds(
    nbytes: float, blocks: int, nodes: int, link: Link, sources: int = 1
) -> float:
    """Of the binomial pipeline: T(b) = (b + h)(alpha + M / (b beta)), h = ceil(log2(N/k)) - 1.

    For b equal blocks in chunks of any size: see `equal_links_seconds`.
    """
    steps = lower_bound(nodes, blocks, sources)
    return steps * (link.overhead_s + nbytes / blocks / link.bytes_per_s)


def best_blocks(nbytes: float, nodes: int, link: Link, *, most: int, sources: int = 1) -> int:
    """The number of blocks, 1..most, for which the multicast is over first.

    T is convex in b with its least value at sqrt(h M / (alpha beta)): one of the integers beside.
    """
    if link.overhead_s <= 0:
        return most
    fill = max(lower_bound(nodes, 1, sources) - 1, 0)
    ideal = math.sqrt(fill * nbytes / (link.overhead_s * link.bytes_per_s))
    beside = {max(1, min(most, round_off(ideal))) for round_off in (math.floor, math.ceil)}
    return min(beside, key=lambda b: (multicast_seconds(nbytes, b, nodes, link, sources), b))


def equal_links_seconds(name: str, task: Task) -> float:
    """What the strategy takes on equal links with equal blocks (all as fast as the fastest port).

    Chunks shorten hops, from tau to delta, and not what a port must carry. With g = ceil(D/k)
    destinations in the largest group:

    - chain: b tau + (g - 1) delta. The last node's port takes b blocks, g - 1 hops behind.
    - binomial, taps (which are the same here): (b + h) tau, as with whole blocks, since the
      source's port has a block to carry in each of the b + h steps: all b, and the last one h times
      more. (Where the group is no power of two, twins are as busy in its stead.)
    - head: b tau where g = 1; else a binomial pipeline from the head to the g - 1 others, delta
      late: delta + (b + ceil(log2 g) - 1) tau.

    Any other strategy: 0.
    """
    if not task.destinations:
        return 0.0
    fabric, sources = task.fabric, len(task.sources)
    rate = max(max(port.out, port.into) for port in fabric.ports)
    tau = fabric.overhead_s + min(task.block_bytes) / rate
    delta = fabric.overhead_s + min(task.first_chunks) / rate
    every = task.blocks * fabric.overhead_s + sum(task.block_bytes) / rate
    group = -(-len(task.destinations) // sources)
    if name in ("binomial", "taps"):
        return every + (lower_bound(task.nodes, 1, sources) - 1) * tau
    if name == "chain":
        return every + (group - 1) * delta
    if name == "head":
        return every if group == 1 else every + (lower_bound(group, 1, 1) - 1) * tau + delta
    return 0.0


def are_equal(values: Iterable[float]) -> bool:
    values = tuple(values)
    return min(values) >= (1 - EQUAL) * max(values)


def is_uniform(fabric: Fabric) -> bool:
    """All links alike: no slower or faster ports, no trunk or local link that makes a difference.

    A trunk makes none if it is as wide as all of its rack's ports together.
    """
    ports = fabric.ports
    if not are_equal(rate for port in ports for rate in (port.out, port.into)):
        return False
    if len(_sites(fabric)) < len(ports):
        return False
    racks = {port.rack for port in ports}
    return len(racks) < 2 or not fabric.tight_racks() & racks


def least_seconds(task: Task, *, fill: int = 0) -> float:
    """No schedule of these blocks on this fabric is over sooner.

    The largest of: what a multicast chunk by chunk takes between nodes with the fastest port there
    is; what each destination's own port takes for a copy; a copy over the sources' ports together,
    and over the trunk of each rack that has none. Nodes with local links between them count as one,
    with all their ports. `fill`: chunks that pass before the last destination has its first, if
    more than ceil(log2(N/k)) - 1.

    The first: only who has a chunk can send it, so that the holders of anything at best double in
    the time of a chunk, as those of a block do in a step, and the last destination's port, which
    then has a copy to take in, starts h = ceil(log2(N/k)) - 1 chunks late: b c + h chunk times for
    c chunks a block. With c = 1 the binomial pipeline meets it on equal links; with more, schedules
    of whole blocks come near it (a chain of few nodes) or do not (b c + h c, binomial).
    """
    fabric, nbytes = task.fabric, sum(task.block_bytes)
    sites = _sites(fabric)
    fed = {site for site, nodes in sites.items() if not nodes.isdisjoint(task.sources)}
    bounds = [0.0]
    if len(sites) < task.nodes:
        alpha, local, fill = 0.0, fabric.local_bytes_per_s, 0  # transfers side by side
    else:
        alpha, local = fabric.overhead_s, 0.0
    if len(fed) < len(sites):
        waits = max(lower_bound(len(sites), 1, len(fed)) - 1, fill)
        out = {site: sum(fabric.ports[n].out for n in nodes) for site, nodes in sites.items()}
        into = {site: sum(fabric.ports[n].into for n in nodes) for site, nodes in sites.items()}
        fastest = max(*out.values(), *into.values())
        bounds += [
            (task.blocks + waits) * alpha + (nbytes + waits * min(task.first_chunks)) / fastest,
            _over(nbytes, sum(out[site] for site in fed)),
            *(_over(nbytes, into[site]) for site in sites.keys() - fed),
        ]
    bounds += (_over(nbytes, fabric.ports[node].into + local) for node in task.destinations)
    racks = {port.rack for port in fabric.ports} - {fabric.ports[n].rack for n in task.sources}
    bounds += (nbytes / fabric.trunks[rack] for rack in racks if rack in fabric.trunks)
    return max(bounds)


def _sites(fabric: Fabric) -> dict[Hashable, set[int]]:
    """Nodes by host, where they have a local link; else each by itself."""
    if fabric.local_bytes_per_s <= 0:
        return {node: {node} for node in range(len(fabric.ports))}
    sites: dict[Hashable, set[int]] = {}
    for node, port in enumerate(fabric.ports):
        sites.setdefault(port.host or node, set()).add(node)
    return sites


def physical_limit(task: Task) -> float:
    """Least seconds for this model on these links, without any overhead, however it is scheduled.

    On equal links (copy time) x (B + ceil(log2(N/k)) - 1) / B for B chunks in all, which are blocks
    where relays forward whole blocks only.
    """
    return least_seconds(replace(task, fabric=replace(task.fabric, overhead_s=0.0)))


def _over(nbytes: float, rate: float) -> float:
    return nbytes / rate if rate > 0 else math.inf


def arrival_times(
    moves: Iterable[Move], task: Task, ready: Arrivals | None = None
) -> dict[tuple[int, int], float]:
    """When each moved block is there; inf for one that crosses a port which may not send.

    Moves stand in order of their steps, which is the order of service everywhere. A move takes a
    port at either end, and the trunks between racks, or the local link of a host instead. It starts
    once all of these are free and its sender has the first chunk of its block (or, if it brings the
    block up by itself, all of it, at `ready`), holds each for its bytes at that one's own rate, and
    is over when the slowest is done: a fast sender serves a slow receiver and another one at once.
    The last chunk can't come sooner than its way after it is with the sender. Nobody waits for a
    step to end elsewhere. (Real ports serve a later step while an earlier one waits, and steps that
    share a trunk side by side; that much a prediction may be too late.)
    """
    fabric, alpha = task.fabric, task.fabric.overhead_s
    sizes, chunks = task.block_bytes, task.first_chunks
    free: dict[Hashable, float] = {}
    there: dict[tuple[int, int], float] = dict(ready or {})
    begun: dict[tuple[int, int], float] = dict(there)
    """When the first chunk is there."""
    moved: dict[tuple[int, int], float] = {}
    routes: dict[tuple[int, int], list[tuple[Hashable, float, float]]] = {}
    for _, src, dst, block in moves:
        route = routes.get((src, dst))
        if route is None:
            route = routes[src, dst] = _route(fabric, src, dst, alpha)
        nbytes, chunk = sizes[block], chunks[block]
        start = begun.get((src, block), 0.0)
        for link, _, _ in route:
            start = max(start, free.get(link, 0.0))
        end, hop = start, 0.0
        for link, seconds_per_byte, fixed in route:
            over = start + fixed + nbytes * seconds_per_byte
            free[link] = over
            end = max(end, over)
            hop = max(hop, fixed + chunk * seconds_per_byte)
        begun[dst, block] = start + hop
        end = max(end, there.get((src, block), 0.0) + hop)
        there[dst, block] = moved[dst, block] = end
    return moved


def _route(fabric: Fabric, src: int, dst: int, alpha: float) -> list[tuple[Hashable, float, float]]:
    """What a move crosses: (link, seconds per byte, fixed seconds)."""
    ends = ((src, fabric.ports[src].out), (dst, fabric.ports[dst].into))
    if fabric.is_local(src, dst):
        per_byte = 1 / fabric.local_bytes_per_s
        return [(("local out", src), per_byte, alpha), (("local in", dst), per_byte, alpha)]
    names = ("out", "in")
    route: list[tuple[Hashable, float, float]] = [
        ((name, node), _over(1.0, rate), alpha)
        for name, (node, rate) in zip(names, ends, strict=True)
    ]
    for way, rack in zip(("up", "down"), fabric.crosses(src, dst) or (), strict=False):
        if rack in fabric.trunks:
            route.append(((way, rack), _over(1.0, fabric.trunks[rack]), 0.0))
    return route


def schedule_arrivals(
    schedule: Schedule, task: Task, load_bytes_per_s: Mapping[int, float]
) -> dict[tuple[int, int], float]:
    """When each block is on each destination, set-up and loads from lower tiers included.

    `load_bytes_per_s`: by node, what its host memory or disk gives. What a node of `schedule.own`
    with no known rate loads is left out, and so is what depends on it.
    """
    own: dict[tuple[int, int], float] = {}
    for node in schedule.own:
        rate, done = load_bytes_per_s.get(node, 0.0), 0
        for block, nbytes in enumerate(task.block_bytes):
            done += nbytes
            own[node, block] = _over(done, rate)
    moves = arrival_times(schedule.moves, task, {k: at - schedule.setup_s for k, at in own.items()})
    there = own | {key: at + schedule.setup_s for key, at in moves.items()}
    return {key: at for key, at in there.items() if at < math.inf}
