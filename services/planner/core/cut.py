"""Cuts a model that fits no device into parts, one for each device of a group; pure.

A group is a fixed path: each of its devices holds one part, a run of blocks, for good. As few
devices as possible are used, because each further one adds a hop to every token. Of the cuts with
so few parts, one is taken whose largest part is smallest: a token is bound by reading the weights,
so a part takes the time of its bytes, and the slowest stage bounds the throughput. A group lies on
one machine if the model fits on one, since activations then need no network. (`ways` may take
another of the cuts, if it was measured to be faster.)

The largest g rooms are the best g to have. In which order they take their runs is found by dynamic
programming over how many rooms of each size are used: what matters is the furthest block that they
reach. Rooms that are alike count as one size, so that is fast. If there are too many sizes
(`MOST_STATES`), those that are closest count as the smaller of the two.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from shared.ids import NodeId
from shared.layout import room_of
from shared.parts import Part, whole

MOST_STATES = 20_000
"""Sizes of rooms are rounded down until they have no more combinations than this."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one device has room for."""

    node: NodeId
    host: str
    nbytes: int


def room_for(block_bytes: Iterable[int]) -> int:
    """What blocks take of an arena, at most."""
    return sum(map(room_of, block_bytes))


@dataclass(frozen=True, slots=True)
class Cut:
    parts: tuple[Part, ...]
    host: str
    """The machine that has room for all of them. Empty: it takes several."""


def cut(block_bytes: Sequence[int], rooms: Iterable[Room]) -> tuple[Part, ...] | None:
    """The parts, in the order of the blocks; one part if a device has room for the whole model.
    None: the rooms are too small, even all together.

    Deterministic. The parts cover every block once, and there are as many devices, each with room
    for one of them.
    """
    found = cuts(block_bytes, rooms)
    return found[0].parts if found else None


def cuts(block_bytes: Sequence[int], rooms: Iterable[Room]) -> tuple[Cut, ...]:
    """The best cut for each machine that has room for a group, the best of all first. A cut over
    several machines comes last. It is one of them only if it has fewer parts than all others."""
    rooms = tuple(rooms)
    ends = (0, *accumulate(map(room_of, block_bytes)))
    if any(room.nbytes >= ends[-1] for room in rooms):
        return (Cut((whole(len(block_bytes)),), ""),)
    hosts: dict[str, list[int]] = {}
    for room in rooms:
        hosts.setdefault(room.host or room.node, []).append(room.nbytes)
    made = [(stops, host) for host, sizes in hosts.items() if (stops := _fewest(ends, sizes))]
    made.sort(key=lambda each: (len(each[0]), _largest(ends, each[0]), each))
    over = _fewest(ends, [room.nbytes for room in rooms])
    if over and (not made or len(over) < len(made[0][0])):
        made.append((over, ""))
    return tuple(Cut(_parts(stops), host) for stops, host in made)


def _parts(stops: Sequence[int]) -> tuple[Part, ...]:
    return tuple(Part(start, stop) for start, stop in zip((0, *stops), stops, strict=False))


def _fewest(ends: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The ends of the parts of the best cut for rooms of these sizes."""
    ordered, total = sorted(sizes, reverse=True), 0
    for count, size in enumerate(ordered, 1):
        total += size
        if total < ends[-1]:
            continue
        largest = ordered[:count]
        if _stops(ends, largest) is not None:
            return _evenest(ends, largest)
    return None


def _evenest(ends: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The cut for these rooms whose largest part is smallest."""
    parts = sorted({stop - start for index, start in enumerate(ends) for stop in ends[index + 1 :]})
    low, high = 0, len(parts) - 1
    while low < high:
        middle = (low + high) // 2
        if _stops(ends, [min(size, parts[middle]) for size in sizes]) is None:
            low = middle + 1
        else:
            high = middle
    return _stops(ends, [min(size, parts[low]) for size in sizes])


def _stops(ends: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Where parts end that fit into rooms of these sizes, all used at most once; None: none do."""
    counts = Counter(_rounded(sizes))
    reached: dict[tuple[int, ...], tuple[int, ...]] = {(0,) * len(counts): ()}
    """How many rooms of each size are used -> the ends of the parts that reach furthest."""
    for _ in sizes:
        further: dict[tuple[int, ...], tuple[int, ...]] = {}
        for used, stops in reached.items():
            for place, (size, count) in enumerate(counts.items()):
                if used[place] == count:
                    continue
                start = stops[-1] if stops else 0
                stop = bisect_right(ends, ends[start] + size) - 1
                if stop == len(ends) - 1:
                    return (*stops, stop)
                key = (*used[:place], used[place] + 1, *used[place + 1 :])
                if stop > start and (key not in further or further[key][-1] < stop):
                    further[key] = (*stops, stop)
        reached = further
    return None


def _rounded(sizes: Sequence[int]) -> list[int]:
    """Rounds sizes down to other sizes until few enough differ for all combinations to be tried."""
    rounded = sorted(sizes, reverse=True)
    counts = Counter(rounded)
    while prod(count + 1 for count in counts.values()) > MOST_STATES:
        known = sorted(counts, reverse=True)
        upper, lower = min(pairwise(known), key=lambda pair: pair[0] - pair[1])
        counts[lower] += counts.pop(upper)
    return sorted(counts.elements(), reverse=True)


def _largest(ends: Sequence[int], stops: Sequence[int]) -> int:
    return max(ends[stop] - ends[start] for start, stop in zip((0, *stops), stops, strict=False))


def completed(
    parts: Iterable[Part], block_bytes: Sequence[int], rooms: Sequence[Room]
) -> tuple[Part, ...] | None:
    """The cut to which these parts belong, which devices hold. What none of them has is cut as a
    model would be. None: the parts overlap, so that they are of different cuts, or there is no room
    for a group of such parts."""
    found: list[Part] = []
    ends = (*sorted(set(parts)), Part(len(block_bytes), len(block_bytes)))
    for part in ends:
        start = found[-1].stop if found else 0
        if part.start < start:
            return None
        if part.start > start:
            between = cut(block_bytes[start : part.start], rooms)
            if between is None:
                return None
            found += (Part(start + p.start, start + p.stop) for p in between)
        if part.size:
            found.append(part)
    largest = max((room.nbytes for room in rooms), default=0)
    fits = all(room_for(block_bytes[part.start : part.stop]) <= largest for part in found)
    return tuple(found) if fits and len(found) <= len(rooms) else None


def lacking(
    cut: Sequence[Part], there: Mapping[Part, int], groups: int
) -> tuple[tuple[Part, ...], ...]:
    """The parts that each group lacks, for every group that is not whole, until there are `groups`
    of them. `there`: how many devices have each part, or will."""
    return tuple(
        missing
        for number in range(groups)
        if (missing := tuple(part for part in cut if there.get(part, 0) <= number))
    )
