"""What arrivals mean for serving: the first path, the first token, and the capacity while
loading."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from services.planner.core.costs import Arrivals
from services.planner.core.paths import run_end
from services.planner.core.pricing import Stages

SAMPLES = 24
"""The number of moments of the loading window at which the capacity is computed."""


@dataclass(frozen=True)
class Serving:
    """How a cluster runs the blocks that it holds."""

    max_stages: int
    executing: Collection[int] | None = None
    """The nodes that can be stages; None: all. (A source whose copy is in host memory sends blocks
    but runs none.)"""
    block_s: Mapping[int, float] | None = None
    """For each node, the seconds in which a prompt runs through one block, as measured. None: not
    known."""

    def nodes(self, count: int) -> tuple[int, ...]:
        return tuple(range(count) if self.executing is None else sorted(self.executing))


@dataclass(frozen=True)
class Outlook:
    """Predictions in seconds from the start of the multicast. None: never, or not known."""

    first_path_s: float | None = None
    """When a receiving node can first serve, alone or in a path."""
    first_token_s: float | None = None
    """When the first path has run a prompt."""
    first_complete_s: float | None = None
    all_complete_s: float | None = None
    mean_capacity: float | None = None
    """Capacity over the loading window, as a share of the capacity after it. An upper bound: see
    `capacity_bound`."""


def predict(
    held: Sequence[AbstractSet[int]], blocks: int, arrivals: Arrivals, serving: Serving
) -> Outlook:
    """What the arrivals mean for nodes that hold `held` at the start."""
    last: dict[int, float] = {}
    counts: dict[int, int] = {}
    for (node, _), at in arrivals.items():
        last[node] = max(last.get(node, 0.0), at)
        counts[node] = counts.get(node, 0) + 1
    done = [at for node, at in last.items() if len(held[node]) + counts[node] >= blocks]
    ordered = sorted(arrivals.items(), key=lambda item: item[1])
    over = max(done) if done and len(done) == len(last) else None
    first, path = _first_path(held, blocks, ordered, serving)
    return Outlook(
        first_path_s=first,
        first_token_s=None if first is None else _token_at(first, path, serving),
        first_complete_s=min(done, default=None),
        all_complete_s=over,
        mean_capacity=over and mean_capacity(held, blocks, ordered, over, serving),
    )


_Ordered = Sequence[tuple[tuple[int, int], float]]
"""Arrivals in order of time."""


def _token_at(at: float, path: Stages, serving: Serving) -> float | None:
    if serving.block_s is None or any(node not in serving.block_s for node, _, _ in path):
        return None
    return at + sum(serving.block_s[node] * (stop - start) for node, start, stop in path)


def _first_path(
    held: Sequence[AbstractSet[int]], blocks: int, arrivals: _Ordered, serving: Serving
) -> tuple[float | None, Stages]:
    stages = set(serving.nodes(len(held)))
    now = [set(have) if node in stages else set[int]() for node, have in enumerate(held)]
    lacking = set(range(blocks)).difference(*now)
    for (node, block), at in arrivals:
        if node in stages:
            now[node].add(block)
            lacking.discard(block)
            path = () if lacking else _path_around(now, node, block, blocks)
            if path and len(path) <= serving.max_stages:
                return at, path
    return None, ()


def _path_around(now: Sequence[AbstractSet[int]], node: int, block: int, blocks: int) -> Stages:
    """The path with the fewest stages in which `node` runs the blocks it holds around `block`.

    The path may name another holder twice, before and after it. A single source does not stand
    there twice, because schedules begin at the model's ends.
    """
    start = block
    while start - 1 in now[node]:
        start -= 1
    stop = run_end(now[node], block)
    return (*_cover(now, 0, start), (node, start, stop), *_cover(now, stop, blocks))


def _cover(
    now: Sequence[AbstractSet[int]], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """The fewest stages for the blocks from start to stop, each of which some node holds."""
    while start < stop:
        further, node = max((run_end(have, start), -node) for node, have in enumerate(now))
        yield -node, start, min(further, stop)
        start = further


def mean_capacity(
    held: Sequence[AbstractSet[int]],
    blocks: int,
    arrivals: _Ordered,
    over: float,
    serving: Serving,
) -> float:
    """The mean of `capacity_bound` from 0 to `over`, as a share of the capacity at the end."""
    stages = serving.nodes(len(held))
    masks = [sum(1 << block for block in have) for have in held]
    total, passed = 0.0, 0
    bound = capacity_bound([masks[node] for node in stages], blocks)
    for sample in range(SAMPLES):
        moment, before = over * (sample + 0.5) / SAMPLES, passed
        while passed < len(arrivals) and arrivals[passed][1] <= moment:
            (node, block), _ = arrivals[passed]
            masks[node] |= 1 << block
            passed += 1
        if passed > before:
            bound = capacity_bound([masks[node] for node in stages], blocks)
        total += bound
    for (node, block), _ in arrivals[passed:]:
        masks[node] |= 1 << block
    final = capacity_bound([masks[node] for node in stages], blocks)
    return total / SAMPLES / final if final else 0.0


def capacity_bound(held: Iterable[int], blocks: int) -> float:
    """The most that nodes holding these blocks (bit masks) can serve, in units of a complete node.

    Every request runs all blocks. The blocks of a set S are |S| / b of its work, and all of that is
    done by holders of a block in S. Hence capacity <= b |holders of S| / |S|. The bound is taken
    over sets of the rarest blocks, which limit the capacity while a model spreads; paths reach it
    nearly always.
    """
    holders = [mask for mask in held if mask]
    if not holders:
        return 0.0
    copies = [0] * blocks
    by_mask: dict[int, int] = {}
    for mask in holders:
        by_mask[mask] = by_mask.get(mask, 0) + 1
    for mask, count in by_mask.items():
        for block in range(blocks):
            copies[block] += count * (mask >> block & 1)
    if not min(copies):
        return 0.0
    bound = float(len(holders))
    for most in sorted(set(copies)):
        rare = sum(1 << block for block, count in enumerate(copies) if count <= most)
        touched = sum(count for mask, count in by_mask.items() if mask & rare)
        bound = min(bound, blocks * touched / rare.bit_count())
    return bound


def equal_links_capacity(
    nodes: int,
    blocks: int,
    sources: int,
    steps: int,
    *,
    sources_run: bool,
    whole_blocks: bool = True,
) -> float:
    """The mean share of the final capacity over `steps` steps that no schedule on equal links
    beats.

    k sources put out e = min(k, D) new blocks in each step. So at step t at least b - e(t - j)
    blocks have at most k 2^j holders, and the capacity is at most the least over j of N and k 2^j b
    / (b - e(t - j)). If sources are no stages, k (2^j - 1) takes the place of k 2^j. Unless relays
    forward `whole_blocks`, only j = 0 holds: a block that has left its source can be everywhere
    within the step.
    """
    receivers = nodes - sources
    out, idle = min(sources, receivers), 0 if sources_run else 1
    oldest = nodes.bit_length() if whole_blocks else 0
    final = nodes if sources_run else receivers
    total = 0.0
    for step in range(steps):
        bound = float(final)
        for age in range(min(step, oldest), -1, -1):
            rare = blocks - out * (step - age)
            if rare <= 0:
                break
            bound = min(bound, sources * (2**age - idle) * blocks / rare)
        total += bound
    return total / (final * steps) if steps else 1.0
