"""Whether a load that needs disks begins, or waits until others have read them.

Loads that read the same disks at the same time share them. Two of equal size are both over when the
second one would be over if they came one after the other; the first is late for nothing, and holds
memory all the while in which other models' copies could stay. So loads that keep a disk busy come
one after the other: the highest priority first, then who has waited for longest. A large load that
runs keeps no small one waiting, since that is over sooner; and what is read for lower priorities
keeps nobody waiting.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from services.planner.core.links import Links
from services.planner.core.tiers import apart, machine
from shared.ids import NodeId
from shared.messages.pool import NodeInfo

BUSY = 0.75
"""A disk is busy if it is read for this share of the time."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a load reads from disks."""

    disks: Collection[str]
    """Names of machines, whose nodes share a disk."""
    nbytes: int
    """How much of the model is still to come."""
    priority: int
    share: float = 1.0
    """For which share of the time it keeps the disks busy."""
    seconds: float = math.inf
    """For how much longer it reads them if nothing else does; inf: not known."""


def begins_in(new: Read, running: Iterable[Read]) -> float:
    """Seconds until a load begins beside those that run, by what is known now: until these keep at
    most half of its disks busy. inf: not known. With the first disk that is free, ever more loads
    would be on their way at once; with the last, the others would be idle."""
    used, left = defaultdict[str, float](float), defaultdict[str, float](float)
    for read in running:
        if read.nbytes <= new.nbytes and read.priority >= new.priority:
            for disk in read.disks:
                used[disk] += read.share
                left[disk] += read.share * read.seconds
    if not new.disks or median_low(used[disk] for disk in new.disks) < BUSY:
        return 0.0
    return median_low(left[disk] for disk in new.disks)


def disks_of(infos: Mapping[NodeId, NodeInfo], nodes: Iterable[NodeId]) -> frozenset[str]:
    """The disks that these nodes read."""
    return frozenset(machine(infos, node) for node in nodes)


def pace(
    links: Links, nodes: Collection[NodeId], targets: Collection[NodeId]
) -> tuple[float, float]:
    """bytes/s at which the disks of nodes are read that send to these targets (0: not known), and
    for which share of the time: less than 1 if a target's link is slower than all of them together.
    Where only targets read, each loads everything itself."""
    ports = [port for port in map(links.port, targets) if port is not None]
    disks, share = apart(links.nodes, nodes), 1.0
    rates = [links.disk_rate(disk) for disk in disks]
    read = min(rates, default=0.0) if set(nodes) <= set(targets) else sum(rates)
    if read and ports and set(targets).isdisjoint(nodes):
        share = min(1.0, min(port.into for port in ports) / read)
    return (share * read if links.are_timed(disks) else 0.0), share
