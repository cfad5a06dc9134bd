"""How long moves take: closed forms for equal links, and arrival times on any fabric.

A port carries blocks from or to one peer back to back, at beta bytes/s: nodes ask for blocks ahead
of time, so that there is no pause between two blocks. Alpha (`overhead_s`) is paid in two cases.
The first bytes from a new peer come alpha after both ports are free for them. And every byte
reaches the next node alpha after it could have left. A relay forwards a block while it receives it,
so that it is delta = alpha + c / beta behind, for chunks of c bytes. Alpha and beta are measured.
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from services.planner.core.multicast.fabric import Fabric, Task
from services.planner.core.multicast.schedule import Move, Schedule
from services.planner.core.multicast.strategies import lower_bound

Arrivals = Mapping[tuple[int, int], float]
"""(node, block) -> seconds from the start of the multicast until the node holds the block."""

EQUAL = 0.05
"""Rates and sizes that differ by less than this share count as the same."""


def equal_links_seconds(name: str, task: Task) -> float:
    """The strategy's time on equal links with equal blocks (all ports as fast as the fastest).

    There are b blocks of s bytes, M bytes in all, and g = ceil(D/k) destinations in the largest
    group. A block that comes from another node than the block before it takes tau = alpha + s /
    beta.

    - chain: alpha + M / beta + (g - 1) delta. The last node's port takes all blocks, one after the
      other from one node, g - 1 hops behind.
    - binomial, taps (which are the same here): (b + h) tau with h = ceil(log2(N/k)) - 1, however
      small the chunks. The source's port carries a block in each of the b + h steps (all b blocks,
      and the last one h times more), each to another node than in the step before. If the number of
      nodes is no power of two, the ports of twins (`multicast.binomial`) are as busy as the
      source's; for 2 < b < h, and just over 2^h nodes, twins change partners less often, and the
      multicast is over up to (b - 2) alpha sooner. A chain if g = 1.
    - head: a binomial pipeline from the head to the g - 1 others, delta late: delta + (b +
      ceil(log2 g) - 1) tau. A chain if g < 3.

    Returns 0 for any other strategy.
    """
    if not task.destinations:
        return 0.0
    alpha, sources = task.fabric.overhead_s, len(task.sources)
    rate, copy = _fastest(task.fabric), copy_seconds(task)
    tau = alpha + min(task.block_bytes) / rate
    delta = alpha + min(task.first_chunks) / rate
    group = -(-len(task.destinations) // sources)

    def pipeline(nodes: int) -> float:
        late = lower_bound(nodes, 1, 1) - 1
        return copy + ((task.blocks - 1) * alpha + late * tau if late else 0.0)

    if name in ("binomial", "taps"):
        return pipeline(group + 1)
    if name == "chain":
        return copy + (group - 1) * delta
    if name == "head":
        return delta + pipeline(group) if group > 1 else copy
    return 0.0


def best_blocks(task: Task, bytes_per_s: float, *, most: int) -> int:
    """The number of equal blocks, 1..most, in which a binomial pipeline is over soonest on links of
    this rate.

    (b + h)(alpha + M / (b beta)) is convex in b, with its least value at sqrt(h M / (alpha beta));
    the result is one of the two integers beside it.
    """
    alpha, copy = task.fabric.overhead_s, sum(task.block_bytes) / bytes_per_s
    late = max(lower_bound(task.nodes, 1, len(task.sources)) - 1, 0)
    if not alpha or not late:
        return most
    ideal = math.sqrt(late * copy / alpha)
    beside = {max(1, min(most, round_off(ideal))) for round_off in (math.floor, math.ceil)}
    return min(beside, key=lambda blocks: ((blocks + late) * (alpha + copy / blocks), blocks))


def block_seconds(task: Task) -> float:
    """Seconds for the largest block between two of the fastest ports: no copy of it comes
    sooner."""
    return task.fabric.overhead_s + max(task.block_bytes) / _fastest(task.fabric)


def copy_seconds(task: Task) -> float:
    """Seconds for all blocks between two of the fastest ports: no copy of the model comes
    sooner."""
    return task.fabric.overhead_s + sum(task.block_bytes) / _fastest(task.fabric)


def _fastest(fabric: Fabric) -> float:
    return max(max(port.out, port.into) for port in fabric.ports)


def are_equal(values: Iterable[float]) -> bool:
    values = tuple(values)
    return min(values) >= (1 - EQUAL) * max(values)


def is_uniform(fabric: Fabric) -> bool:
    """Whether all links are alike: no slower or faster ports, and no trunk or local link that
    matters.

    A trunk does not matter if it is as wide as all of its rack's ports together.
    """
    ports = fabric.ports
    if not are_equal(rate for port in ports for rate in (port.out, port.into)):
        return False
    if len(_sites(fabric)) < len(ports):
        return False
    racks = {port.rack for port in ports}
    return len(racks) < 2 or not fabric.tight_racks() & racks


def least_seconds(task: Task, *, fill: int = 0) -> float:
    """The least seconds that any schedule of these blocks on this fabric takes.

    It is the largest of these bounds: the time of a multicast, chunk by chunk, between nodes with
    the fastest port there is; the time of a copy over each destination's own port, over the ports
    of all sources together, and over the trunk of each rack without a source. Nodes with local
    links between them count as one node with all their ports. `fill`: the number of chunks that
    pass before the last destination has its first, if more than ceil(log2(N/k)) - 1.

    For the first bound: only a holder of a chunk can send it, to one node after the other, so that
    the holders of anything at best double in delta. The last destination's port, which has to take
    in a whole copy, begins h = ceil(log2(N/k)) - 1 times delta late: alpha + M / beta + h delta. A
    chain meets the bound if it has no more hops than that. A binomial pipeline of blocks of one
    chunk meets it without alpha; with alpha, all its changes of partners come on top, (b - 1)
    alpha.
    """
    fabric, nbytes = task.fabric, sum(task.block_bytes)
    sites = _sites(fabric)
    fed = {site for site, nodes in sites.items() if not nodes.isdisjoint(task.sources)}
    bounds = [0.0]
    if len(sites) < task.nodes:
        alpha, local, fill = 0.0, fabric.local_bytes_per_s, 0  # transfers run side by side
    else:
        alpha, local = fabric.overhead_s, 0.0
    if len(fed) < len(sites):
        waits = max(lower_bound(len(sites), 1, len(fed)) - 1, fill)
        out = {site: sum(fabric.ports[n].out for n in nodes) for site, nodes in sites.items()}
        into = {site: sum(fabric.ports[n].into for n in nodes) for site, nodes in sites.items()}
        fastest = max(*out.values(), *into.values())
        bounds += [
            (1 + waits) * alpha + (nbytes + waits * min(task.first_chunks)) / fastest,
            _over(nbytes, sum(out[site] for site in fed)),
            *(_over(nbytes, into[site]) for site in sites.keys() - fed),
        ]
    bounds += (_over(nbytes, fabric.ports[node].into + local) for node in task.destinations)
    racks = {port.rack for port in fabric.ports} - {fabric.ports[n].rack for n in task.sources}
    bounds += (nbytes / fabric.trunks[rack] for rack in racks if rack in fabric.trunks)
    return max(bounds)


def _sites(fabric: Fabric) -> dict[Hashable, set[int]]:
    """Groups nodes by host if their host has a local link; any other node is by itself."""
    if fabric.local_bytes_per_s <= 0:
        return {node: {node} for node in range(len(fabric.ports))}
    sites: dict[Hashable, set[int]] = {}
    for node, port in enumerate(fabric.ports):
        sites.setdefault(port.host or node, set()).add(node)
    return sites


def physical_limit(task: Task) -> float:
    """The least seconds for this model on these links, without any overhead, however it is
    scheduled.

    On equal links it is (copy time) x (B + ceil(log2(N/k)) - 1) / B for B chunks in all, which are
    whole blocks if relays forward only whole blocks.
    """
    return least_seconds(replace(task, fabric=replace(task.fabric, overhead_s=0.0)))


def _over(nbytes: float, rate: float) -> float:
    return nbytes / rate if rate > 0 else math.inf


def arrival_times(
    moves: Iterable[Move], task: Task, ready: Arrivals | None = None
) -> dict[tuple[int, int], float]:
    """When each moved block arrives, in seconds; inf if it crosses a port that may not send.

    Moves are in order of their steps, and every link serves them in this order. A move takes a port
    at either end and the trunks between racks, or instead the local link of a host. Its bytes flow
    once all of these are free, alpha later at a port whose last move was with another node, and
    alpha after its sender has the first chunk of its block (or, if the sender brings the block up
    by itself, all of it, at `ready`). The move holds each link for its bytes at that link's own
    rate, and is over when the slowest link is done: so a fast sender serves several slow receivers
    at once. The last chunk arrives no sooner than its own way after the sender has it. Nobody waits
    for a step to end elsewhere. (Real ports serve a later step while an earlier one waits, and
    serve steps that share a trunk side by side; a prediction may be too late by that much.)
    """
    fabric, alpha = task.fabric, task.fabric.overhead_s
    sizes, chunks = task.block_bytes, task.first_chunks
    free: dict[Hashable, float] = {}
    partners: dict[Hashable, int | None] = {}
    """For each port, the partner in its last move."""
    there: dict[tuple[int, int], float] = dict(ready or {})
    begun: dict[tuple[int, int], float] = dict(there)
    """When the first chunk has arrived."""
    moved: dict[tuple[int, int], float] = {}
    routes: dict[tuple[int, int], list[tuple[Hashable, int | None, float]]] = {}
    for _, src, dst, block in moves:
        route = routes.get((src, dst))
        if route is None:
            route = routes[src, dst] = _route(fabric, src, dst)
        nbytes, chunk = sizes[block], chunks[block]
        flows = begun.get((src, block), 0.0) + alpha
        for link, partner, _ in route:
            at = free.get(link, 0.0)
            if partners.get(link) != partner:
                partners[link] = partner
                at += alpha
            flows = max(flows, at)
        end, hop = flows, 0.0
        for link, _, seconds_per_byte in route:
            over = flows + nbytes * seconds_per_byte
            free[link] = over
            end = max(end, over)
            hop = max(hop, chunk * seconds_per_byte)
        begun[dst, block] = flows + hop
        end = max(end, there.get((src, block), 0.0) + alpha + hop)
        there[dst, block] = moved[dst, block] = end
    return moved


def _route(fabric: Fabric, src: int, dst: int) -> list[tuple[Hashable, int | None, float]]:
    """The links that a move crosses, as (link, the node at the other end if the link is a port,
    seconds per byte)."""
    if fabric.is_local(src, dst):
        per_byte = 1 / fabric.local_bytes_per_s
        return [(("local out", src), dst, per_byte), (("local in", dst), src, per_byte)]
    route: list[tuple[Hashable, int | None, float]] = [
        (("out", src), dst, _over(1.0, fabric.ports[src].out)),
        (("in", dst), src, _over(1.0, fabric.ports[dst].into)),
    ]
    for way, rack in zip(("up", "down"), fabric.crosses(src, dst) or (), strict=False):
        if rack in fabric.trunks:
            route.append(((way, rack), None, _over(1.0, fabric.trunks[rack])))
    return route


def schedule_arrivals(
    schedule: Schedule, task: Task, load_bytes_per_s: Mapping[int, float]
) -> dict[tuple[int, int], float]:
    """When each block is on each destination, including set-up and loads from lower tiers.

    `load_bytes_per_s`: for each node, the rate of its host memory or disk. If a node of
    `schedule.own` has no known rate, its blocks are left out, and so is everything that depends on
    them.
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
