"""Binomial pipelines in a row, each fed by the output tap of the pipeline before.

A binomial pipeline leaves one node free to send in every step (`binomial.Pipeline.taps`). So racks
behind narrow trunks are loaded one after the other: each rack is a pipeline of its own, whose
source is the tap of the rack before. One block in each step crosses a trunk, and each block crosses
it once (the last block up to floor(log2(n_r + 1)) times more). With n_1 nodes in the first rack,
source included, and n_r in rack r, rack r is complete at

    lag_1 + .. + lag_{r-1} + b + ceil(log2(n_r + 1)) - 1,
    lag_1 = floor(log2 n_1), lag_q = floor(log2(n_q + 1)).

Nodes of different speed are kept apart in the same way, fast before slow, since a pipeline runs at
the pace of its slowest node. If the next pipeline is slower, one node is taken out of the faster
one and does nothing but feed the next: a tap would slow its own pipeline down.

Many racks of one speed form a binomial pipeline of racks instead of a row (`racks.py`). Racks that
hold sources are fed by these, other racks by whichever row is shortest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.planner.core.multicast.binomial import pipeline
from services.planner.core.multicast.fabric import Fabric
from services.planner.core.multicast.groups import balanced, orders
from services.planner.core.multicast.racks import rack_moves
from services.planner.core.multicast.reduction import Core
from services.planner.core.multicast.schedule import Move, by_step

_ALIKE = 0.8
"""Nodes of a speed class have at least this share of the speed of its fastest node."""


@dataclass
class _Zone:
    """The nodes of one rack and one speed class. All racks behind wide trunks count as one rack."""

    speed: float
    rack: str
    """Empty if the rack's trunk is no bottleneck."""
    sources: list[int] = field(default_factory=list)
    relays: list[int] = field(default_factory=list)


@dataclass
class _Row:
    """A source, the nodes that it feeds, and the zones that follow, each fed by the one before."""

    source: int
    zone: _Zone
    fed: list[int]
    hanging: list[_Zone] = field(default_factory=list)

    @property
    def lag(self) -> int:
        """Steps between the source and a zone that would be added at the row's end."""
        sizes = [len(self.fed), *(len(zone.relays) for zone in self.hanging)]
        return sum((1 + size).bit_length() - 1 for size in sizes)


def taps_moves(core: Core) -> list[Move]:
    """The moves in order of steps. With a single zone this is a binomial pipeline."""
    zones = _zones(core)
    rows = [row for zone in zones for row in _own_rows(zone)]
    for zone in sorted(zones, key=lambda zone: (-zone.speed, -len(zone.relays))):
        if not zone.sources:
            _choose(rows, zone).hanging.append(zone)
    rows = [row for row in rows if row.fed or row.hanging]
    moves: list[Move] = []
    for row, order in zip(rows, orders(core.task.blocks, len(rows)), strict=True):
        moves += _moves(row, order, core.task.fabric)
    return by_step(moves)


def _zones(core: Core) -> list[_Zone]:
    """The zones of the task. No node counts as faster than the fastest source, since it could not
    use more."""
    fabric = core.task.fabric
    top = max((fabric.ports[source].out for source in core.sources), default=0.0)
    speeds = {source: fabric.ports[source].out for source in core.sources}
    for node in core.relays:
        speeds[node] = min(fabric.ports[node].out, fabric.ports[node].into, top)
    classes = _classes(speeds.values())
    tight = fabric.tight_racks()
    zones: dict[tuple[float, str], _Zone] = {}
    for node in (*core.sources, *core.relays):
        rack = fabric.ports[node].rack
        key = (classes[speeds[node]], rack if rack in tight else "")
        zone = zones.setdefault(key, _Zone(*key))
        (zone.sources if node in core.sources else zone.relays).append(node)
    return list(zones.values())


def _classes(speeds: Iterable[float]) -> Mapping[float, float]:
    """Speed -> the speed of the fastest node of its class."""
    classes: dict[float, float] = {}
    fastest = 0.0
    for speed in sorted(set(speeds), reverse=True):
        if speed < _ALIKE * fastest or not classes:
            fastest = speed
        classes[speed] = fastest
    return classes


def _own_rows(zone: _Zone) -> list[_Row]:
    """One row for each source of the zone. Sources that feed no node of the zone are free to feed
    other zones."""
    count = min(len(zone.sources), len(zone.relays))
    parts = [list(part) for part in balanced(zone.relays, count)]
    parts += [[] for _ in zone.sources[count:]]
    return [_Row(source, zone, fed) for source, fed in zip(zone.sources, parts, strict=True)]


def _choose(rows: Sequence[_Row], zone: _Zone) -> _Row:
    """The row that the zone should follow: as fast as the zone, ending in its rack if there is such
    a row, and short.

    Only one source of a rack feeds other racks, through the one trunk.
    """
    feeding = {row.zone.rack: row for row in rows if row.hanging and row.zone.rack}

    def key(row: _Row) -> tuple[bool, int]:
        return ([row.zone, *row.hanging][-1].rack != zone.rack, row.lag)

    able = [
        row
        for row in rows
        if row.zone.speed >= zone.speed and feeding.get(row.zone.rack, row) is row
    ]
    return min(able, key=key)


def _moves(row: _Row, order: Sequence[int], fabric: Fabric) -> list[Move]:
    """One pipeline after the other, or a pipeline of racks if that takes fewer steps."""
    moves = _row_moves(_pipelines(row, fabric), order, row.source)
    if not _is_even(row, fabric):
        return moves
    racks = [[row.source, *row.fed], *(zone.relays for zone in row.hanging)]
    other = rack_moves(racks, order)
    if other is not None and other[-1].step < max(move.step for move in moves):
        return other
    return moves


def _is_even(row: _Row, fabric: Fabric) -> bool:
    """Whether these are several racks of one speed class, with trunks that are no slower."""
    return len(row.hanging) > 1 and all(
        zone.speed == row.zone.speed <= _trunk(row.zone, zone, fabric) / _ALIKE
        for zone in row.hanging
    )


def _pipelines(row: _Row, fabric: Fabric) -> list[list[int]]:
    """The nodes of the row's pipelines. Each pipeline is fed by the tap of the one before."""
    done = [list(row.fed)]
    before = row.zone
    for zone in _sorted(row):
        trunk = _trunk(before, zone, fabric)
        if min(trunk, zone.speed) < _ALIKE * before.speed and done[-1]:
            done.append([done[-1].pop()])
        relays = list(zone.relays)
        if trunk < _ALIKE * zone.speed:
            # Without a relay the last block would cross the trunk several times, so one node takes
            # all from it.
            done.append([relays.pop(0)])
        done.append(relays)
        before = zone
    return done


def _sorted(row: _Row) -> list[_Zone]:
    """Fast zones first. In a class, first a zone in the rack where the row is, then large zones,
    which soonest serve much. A zone of 2^m - 1 nodes comes last if there is one: that saves a
    step."""
    done: list[_Zone] = []
    for speed in sorted({zone.speed for zone in row.hanging}, reverse=True):
        rack = [row.zone, *done][-1].rack
        zones = [zone for zone in row.hanging if zone.speed == speed]
        zones.sort(key=lambda zone: (zone.rack != rack, -len(zone.relays)))
        for zone in reversed(zones):
            if (1 + len(zone.relays)).bit_count() == 1 and zone.rack != rack:
                zones.remove(zone)
                zones.append(zone)
                break
        done += zones
    return done


def _trunk(before: _Zone, zone: _Zone, fabric: Fabric) -> float:
    """bytes/s between the zones as far as trunks limit it; infinite if they do not."""
    racks = {before.rack, zone.rack} if before.rack != zone.rack else set()
    return min((fabric.trunks[rack] for rack in racks if rack), default=math.inf)


def _row_moves(pipelines: Sequence[Sequence[int]], order: Sequence[int], source: int) -> list[Move]:
    moves: list[Move] = []
    start = 0
    roots: Sequence[int] = [source]
    for nodes in pipelines:
        part = pipeline(roots, nodes, order, start)
        moves += part.moves
        start, roots = start + part.lag, part.taps
    return moves
