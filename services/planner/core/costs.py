"""How long moves take: closed forms for the multicast, and a prediction for any list of moves.

A block of s bytes takes alpha + s / beta seconds from port to port: alpha (`overhead_s`) is the
fixed time of a transfer, beta (`bytes_per_s`) the slower end's rate. Both are measured.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.planner.core.multicast.schedule import Move
from services.planner.core.multicast.strategies import lower_bound
from services.planner.core.paths import fewest_stages, run_end

Arrivals = Mapping[tuple[int, int], float]
"""(node, block) -> seconds from the start of the multicast at which the block is there."""


@dataclass(frozen=True)
class Link:
    bytes_per_s: float
    overhead_s: float


def multicast_seconds(
    nbytes: float, blocks: int, nodes: int, link: Link, sources: int = 1
) -> float:
    """T(b) = (b + h)(alpha + M / (b beta)), h = ceil(log2(N/k)) - 1, for b equal blocks."""
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


def physical_limit(
    nbytes: float, blocks: int, nodes: int, bytes_per_s: float, sources: int = 1
) -> float:
    """Least seconds for b equal blocks on these links, without any overhead."""
    return multicast_seconds(nbytes, blocks, nodes, Link(bytes_per_s, 0.0), sources)


def arrival_times(
    moves: Iterable[Move],
    block_bytes: Sequence[int],
    bytes_per_s: Sequence[float],
    overhead_s: float,
) -> dict[tuple[int, int], float]:
    """When each moved block is there, with every node's own link rate (both directions alike).

    Moves stand in order of their steps, which is the order of service at both ports. A move starts
    once its block is there and both ports are free; nobody waits for a step to end elsewhere.
    """
    out_free, in_free = [0.0] * len(bytes_per_s), [0.0] * len(bytes_per_s)
    there: dict[tuple[int, int], float] = {}
    for _, src, dst, block in moves:
        start = max(out_free[src], in_free[dst], there.get((src, block), 0.0))
        rate = min(bytes_per_s[src], bytes_per_s[dst])
        end = start + overhead_s + block_bytes[block] / rate
        out_free[src] = in_free[dst] = there[dst, block] = end
    return there


@dataclass(frozen=True)
class Prediction:
    """Seconds from the start of the multicast; None: never."""

    first_path_s: float | None
    """A receiving node can serve, alone or in a path."""
    first_complete_s: float | None
    all_complete_s: float | None


def predict(
    held: Sequence[AbstractSet[int]],
    blocks: int,
    arrivals: Arrivals,
    *,
    max_stages: int,
    executing: Collection[int] | None = None,
) -> Prediction:
    """What the arrivals mean for nodes that hold `held` at the start.

    `executing`: the nodes that can be stages; None: all. A source whose copy is in host memory
    sends blocks but runs none.
    """
    receivers = sorted({node for node, _ in arrivals})
    done: list[float] = []
    for node in receivers:
        times = [at for (dst, _), at in arrivals.items() if dst == node]
        if len(held[node]) + len(times) >= blocks:
            done.append(max(times))
    return Prediction(
        first_path_s=_first_path(held, blocks, arrivals, max_stages, executing),
        first_complete_s=min(done, default=None),
        all_complete_s=max(done) if done and len(done) == len(receivers) else None,
    )


def _first_path(
    held: Sequence[AbstractSet[int]],
    blocks: int,
    arrivals: Arrivals,
    max_stages: int,
    executing: Collection[int] | None,
) -> float | None:
    stages = range(len(held)) if executing is None else executing
    now = [set(have) if node in stages else set[int]() for node, have in enumerate(held)]
    lacking = set(range(blocks)).difference(*now)
    for (node, block), at in sorted(arrivals.items(), key=lambda item: item[1]):
        if node in stages:
            now[node].add(block)
            lacking.discard(block)
            if not lacking and _serves(now, node, block, blocks, max_stages):
                return at
    return None


def _serves(
    now: Sequence[AbstractSet[int]], node: int, block: int, blocks: int, max_stages: int
) -> bool:
    """Whether some path has the run of blocks around `block` on `node` as a stage.

    One holder may be counted on both sides of it; schedules begin at the model's ends, so that a
    lone source is not.
    """
    start = block
    while start - 1 in now[node]:
        start -= 1
    before = fewest_stages(now, 0, start)
    after = fewest_stages(now, run_end(now[node], block), blocks)
    return before is not None and after is not None and before + 1 + after <= max_stages
