"""Whether a load that needs disks begins, or waits until others have read them.

Loads that read the same disks at the same time share them. Two of equal size are both over when the
second one would be over if they came one after the other; the first is late for nothing, and holds
memory all the while in which other models' copies could stay. So loads that keep a disk busy come
one after the other: the highest priority first, then who has waited for longest. A large load that
runs keeps no small one waiting, since that is over sooner; and what is read for lower priorities
keeps nobody waiting.

No plan deals blocks to several disks quite evenly, so one of them is free first. The next load
begins then, and gets the less from a disk the more that has still to read (`tiers.shares`): all
disks are read all the time.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from services.planner.core.links import Links
from services.planner.core.tiers import apart, machine
from shared.ids import NodeId
from shared.messages.pool import NodeInfo

BUSY = 0.75
"""A disk is busy if it is read for this share of the time."""
EARLY_S = 0.05
"""How long before its disk is free the next load begins, in seconds. The time is needed to free
memory for the load, and to give nodes their orders."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a load reads from disks."""

    left: Mapping[str, float]
    """By the name of the machine, whose nodes share a disk: seconds until the disk has read what
    the load needs, if it reads nothing else; inf: not known."""
    nbytes: int
    """How much of the model is still to come."""
    priority: int
    share: float = 1.0
    """For which share of the time it keeps the disks busy."""
    block_s: Mapping[str, float] = field(default_factory=dict)
    """In how many seconds each disk reads the largest block."""

    @property
    def free_in(self) -> float:
        """Seconds until the first of the disks is free for another load."""
        return wait_s(min(self.left.values(), default=0.0)) if self.share >= BUSY else 0.0

    def expected(self, seconds: Mapping[str, float]) -> "Read":
        """With what should be left to each disk, as far as that fits what is known: of the last
        block any part may have come."""

        def left(disk: str, most: float) -> float:
            least = max(0.0, most - self.block_s.get(disk, 0.0))
            return min(most, max(least, seconds.get(disk, most)))

        return replace(self, left={disk: left(disk, most) for disk, most in self.left.items()})


def wait_s(free_s: float) -> float:
    """How long a load waits if its disk is free in `free_s` seconds."""
    return max(0.0, free_s - EARLY_S)


def begins_in(new: Read, running: Iterable[Read]) -> float:
    """Seconds until a load begins beside those that run, by what is known now: until these leave
    one of its disks free. inf: not known."""
    used, left = defaultdict[str, float](float), defaultdict[str, float](float)
    for read in running:
        if _is_first(read, new):
            for disk, seconds in read.left.items():
                used[disk] += read.share
                left[disk] += seconds
    if not new.left or min(used[disk] for disk in new.left) < BUSY:
        return 0.0
    return wait_s(min(left[disk] for disk in new.left))


def _is_first(read: Read, new: Read) -> bool:
    """Whether a load waits for one that runs. If not, they share their disks."""
    return read.nbytes <= new.nbytes and read.priority >= new.priority


def to_read(new: Read, running: Iterable[Read], alone_s: float) -> dict[str, float]:
    """For each disk the seconds that it reads for loads that run before a new one has all that it
    needs, as far as that is known. `alone_s`: the time of the new one if nothing else is read.
    What it shares a disk with takes half of the disk for about that time."""
    seconds = defaultdict[str, float](float)
    for read in running:
        for disk, left in read.left.items():
            known = left if left < math.inf else 0.0
            seconds[disk] += known if _is_first(read, new) else min(known, alone_s)
    return dict(seconds)


def disks_of(infos: Mapping[NodeId, NodeInfo], nodes: Iterable[NodeId]) -> frozenset[str]:
    """The disks that these nodes read."""
    return frozenset(machine(infos, node) for node in nodes)


def share_of_time(links: Links, nodes: Collection[NodeId], targets: Collection[NodeId]) -> float:
    """For which share of the time disks of nodes are read that send to these targets: less than 1
    if a target's link is slower than all of them together."""
    ports = [port for port in map(links.port, targets) if port is not None]
    read = sum(links.disk_rate(disk) for disk in apart(links.nodes, nodes))
    if not read or not ports or not set(targets).isdisjoint(nodes):
        return 1.0
    return min(1.0, min(port.into for port in ports) / read)
