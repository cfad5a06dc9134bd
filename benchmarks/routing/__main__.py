"""Which queue a request meets, by how its instance is chosen, beside what theory says; and how long
a choice takes.

Run: .venv/bin/python -m benchmarks.routing [--instances 8 64 1000] [--seconds 100] [--seed 0]. The
gateways' own dispatch cores choose, in simulated time, so the waits are the same on every machine.
Bars: with equal instances and one gateway our p99 is within a tenth of theory's for two choices; a
choice takes at most 20 us. docs/routing.md explains the table.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence

from benchmarks.machine import machine
from benchmarks.multicast.bars import Bar
from benchmarks.routing import theory
from benchmarks.routing.decisions import decisions
from benchmarks.routing.policies import POLICIES, TWO
from benchmarks.routing.world import Measured, World

LOAD = 0.8
CLOSE, CHOICE_US = 0.1, 20.0
SPEEDS = (0.5, 1.0, 1.0, 1.5)
_ALPHA, _MOST = 1.5, 100.0
"""Of the heavy tail: a Pareto distribution that is cut off."""
_MEAN: float = _ALPHA / (_ALPHA - 1) * (1 - _MOST ** (1 - _ALPHA)) / (1 - _MOST**-_ALPHA)


def exponential(rng: random.Random) -> float:
    return rng.expovariate(1.0)


def heavy(rng: random.Random) -> float:
    """The longest hundredth of the requests has about a quarter of the work."""
    drawn: float = 1 - rng.random() * (1 - _MOST**-_ALPHA)
    return math.pow(drawn, -1 / _ALPHA) / _MEAN


Setting = tuple[str, Sequence[float], Callable[[random.Random], float], int]
SETTINGS: tuple[Setting, ...] = (
    ("equal speeds, exponential work", (1.0,), exponential, 1),
    ("equal speeds, exponential work", (1.0,), exponential, 10),
    ("mixed speeds, heavy-tailed work", SPEEDS, heavy, 1),
    ("mixed speeds, heavy-tailed work", SPEEDS, heavy, 10),
)


def measure(setting: Setting, policy: str, n: int, seconds: float, seed: int) -> Measured:
    _, speeds, work, gateways = setting
    capacities = [speeds[i % len(speeds)] for i in range(n)]
    world = World(capacities, gateways, POLICIES[policy], work, LOAD, seed)
    return world.run(seconds, seconds)


def waits(instances: Sequence[int], seconds: float, seed: int) -> Iterator[Bar]:
    for setting in SETTINGS:
        what, _, _, gateways = setting
        print(f"\n{what}, {gateways} gateway{'s' * (gateways > 1)}, load {LOAD:g}")
        heads = "".join(f" p50 / p99, longest at n={n} |" for n in instances)
        print(f"| |{heads}\n|---|{'---|' * len(instances)}")
        p99 = {}
        for policy in POLICIES:
            row = ""
            for n in instances:
                found = measure(setting, policy, n, seconds, seed)
                p99[policy, n] = found.wait(0.99)
                row += f" {found.wait(0.5):.2f} / {found.wait(0.99):.2f}, "
                row += f"{found.usual_longest:.1f} ({found.longest}) |"
            print(f"| {policy} |{row}", flush=True)
        if setting is SETTINGS[0]:
            expected = theory.two_choices_wait(LOAD)
            for n in instances:
                longest = theory.two_choices_longest(n, LOAD)
                one = theory.one_queue_wait(n, LOAD)
                print(
                    f"theory at n={n}: two choices p99 {expected:.2f}, longest {longest}; "
                    f"random p99 {theory.random_wait(LOAD):.2f}; one queue for all p99 {one:.2f}"
                )
            most = max(instances)
            off = abs(p99[TWO, most] / expected - 1)
            text = f"two choices at n={most}: p99 {p99[TWO, most]:.2f} s, theory {expected:.2f} s"
            yield Bar(f"{text} (bar within {CLOSE:.0%})", off <= CLOSE)


def choices() -> Iterator[Bar]:
    print(f"\nmicroseconds of a choice; {machine()}")
    for n in (10, 100, 1000):
        found = dict(decisions(n))
        print(f"{n} instances: " + "; ".join(f"{what} {us:.1f}" for what, us in found.items()))
        worst = max(found, key=lambda what: found[what])
        yield Bar(
            f"slowest choice among {n}: {worst}, {found[worst]:.1f} us (bar {CHOICE_US:g})",
            found[worst] <= CHOICE_US,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bars = [*waits(args.instances, args.seconds, args.seed), *choices()]
    print()
    for bar in bars:
        print(bar)


if __name__ == "__main__":
    main()
