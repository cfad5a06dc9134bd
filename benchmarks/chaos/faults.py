"""What goes wrong in a run, and when: drawn from a seed, so that a run can be repeated."""

import enum
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST = 3
"""Faults in a run."""
HALF = 0.1
"""The share of runs in which half of the nodes are killed at the same time, and nothing else; and
of runs in which they are told at the same time that their machines are taken away in NOTICE_S."""
NOTICE_S = 30.0
FELT_S = 3.0
"""A fault is felt for about this long after its beginning."""


class Kind(enum.Enum):
    KILL = "killed"
    END = "told to end"
    NOTICE = "told that it is taken away"
    """SIGTERM, and SIGKILL after NOTICE_S."""
    PAUSE = "stopped"
    CUT = "cut off"
    SLOW = "on a slow link"
    RESET = "on an adapter that resets"
    """Its links go down and up again and again, and all of its connections are reset each time."""


LASTING = (Kind.PAUSE, Kind.CUT, Kind.SLOW, Kind.RESET)
SIGNALS = (Kind.KILL, Kind.END, Kind.NOTICE, Kind.PAUSE)
"""What needs no network of its own."""


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    """Since the load of the run began."""
    kind: Kind
    process: str
    role: str
    for_s: float
    """0 for a death: the process is started again a second later. After a notice: when it is killed
    at the latest."""

    def __str__(self) -> str:
        word = "within" if self.kind is Kind.NOTICE else "for"
        lasting = f" {word} {self.for_s:.0f} s" if self.for_s else ""
        return f"{self.process} {self.kind.value} at {self.at_s:.2f} s{lasting}"


def draw(
    seed: int,
    processes: Mapping[str, str],
    *,
    kinds: Iterable[Kind],
    within_s: float,
    lasting_s: float,
) -> tuple[Fault, ...]:
    """One to MOST faults, in order of time, each on a process of its own; or half of the nodes are
    killed, or given notice, at the same time.

    `processes`: the role of each. Of each role enough stay untouched for the cluster to go on: a
    majority of the NATS servers, half of the nodes, and one process of any other role that has
    several. A slow link is a node's.
    """
    rng = random.Random(seed)
    if (chance := random.Random(f"half {seed}").random()) < 2 * HALF:
        kind = Kind.KILL if chance < HALF else Kind.NOTICE
        return _half(rng, processes, rng.uniform(0.0, within_s), kind)
    kinds = sorted(set(kinds) - {Kind.NOTICE}, key=lambda kind: kind.name)
    left = {
        role: _may_fail(role, list(processes.values()).count(role)) for role in processes.values()
    }
    names = sorted(processes)
    found: list[Fault] = []
    for _ in range(rng.randint(1, MOST)):
        name = rng.choice(names)
        role = processes[name]
        kind = rng.choice([kind for kind in kinds if kind is not Kind.SLOW or role == "node"])
        at_s = rng.uniform(0.0, within_s)
        names.remove(name)
        if left[role]:
            left[role] -= 1
            for_s = lasting_s if kind in LASTING else 0.0
            found.append(Fault(at_s, kind, name, role, for_s))
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def _half(
    rng: random.Random, processes: Mapping[str, str], at_s: float, kind: Kind
) -> tuple[Fault, ...]:
    nodes = sorted(name for name, role in processes.items() if role == "node")
    hit = sorted(rng.sample(nodes, len(nodes) // 2))
    for_s = NOTICE_S if kind is Kind.NOTICE else 0.0
    return tuple(Fault(at_s, kind, name, "node", for_s) for name in hit)


def alone(fault: Fault, faults: Iterable[Fault]) -> bool:
    """Whether what happens after a fault is its own doing: no other is felt at that time."""
    others = (other for other in faults if other is not fault)
    return all(
        abs(other.at_s - fault.at_s) > FELT_S
        and not other.at_s < fault.at_s <= other.at_s + other.for_s
        for other in others
    )


def _may_fail(role: str, count: int) -> int:
    match role:
        case "nats":
            return (count - 1) // 2
        case "node":
            return count // 2
        case _:
            return max(1, count - 1)
