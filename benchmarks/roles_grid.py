"""Whether the planner parts prefill and decode where that is better, in virtual time.

Run: `.venv/bin/python -m benchmarks.roles_grid`, nine minutes on two processors, all of which are
used. The settings are like those of `benchmarks.roles`. The planner is right if what it chose (the
time until it has chosen included) is at least as near to the better of together and apart as to the
worse.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import roles
from shared import telemetry
from shared.config import TelemetryConfig
from shared.messages.pool import PLANNERS_CHOICE

FIXED = 0.0, 0.375, 0.5
"""The shares that the choice is compared with; 0: together."""
ALIKE = 0.02
"""Settings in which being apart changes less than this share of the requests are right either
way."""
BAR = 0.95
GRID = tuple(
    (roles.Load(prompt, output, (rate,), tpot_s), rate)
    for prompt, output, rates, tpot_s in (
        (3072, 64, (8.0, 12.0, 18.0, 24.0), 0.020),
        (3072, 64, (12.0, 18.0), 0.050),
        (2048, 128, (8.0, 16.0, 24.0), 0.020),
        (2048, 128, (16.0, 24.0), 0.100),
        (2048, 32, (16.0, 28.0), 0.020),
        (1024, 128, (16.0, 32.0), 0.020),
        (512, 256, (32.0, 48.0), 0.020),
        (512, 64, (48.0, 80.0), 0.020),
        (256, 128, (64.0,), 0.020),
    )
    for rate in rates
)


@dataclass(frozen=True, slots=True)
class Setting:
    load: roles.Load
    rate: float
    good: dict[float, float]
    """By the share that prefills: the share of the requests that keep both objectives."""

    @property
    def apart(self) -> float:
        return max(good for share, good in self.good.items() if share not in (0.0, PLANNERS_CHOICE))

    @property
    def right(self) -> bool:
        """Whether what the planner chose is at least as near to the better of the two as to the
        worse."""
        best = max(self.good[0.0], self.apart)
        return self.good[PLANNERS_CHOICE] >= best - max(ALIKE, abs(self.good[0.0] - self.apart) / 2)


def part(number: int, parts: int, seconds: float) -> None:
    """Runs every `parts`-th simulation, and prints a line of JSON for each."""
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    runs = [(i, share) for i in range(len(GRID)) for share in (*FIXED, PLANNERS_CHOICE)]
    for index, share in runs[number::parts]:
        load, rate = GRID[index]
        found = roles.good(roles.simulate(load, rate, share, 0, seconds), load)
        print(json.dumps([index, share, found]), flush=True)


def results(seconds: float) -> Iterator[list[Any]]:
    """All simulations, on all processors."""
    parts = os.cpu_count() or 1
    command = [sys.executable, "-m", "benchmarks.roles_grid", "--seconds", str(seconds), "--part"]
    running = [
        subprocess.Popen([*command, str(n), str(parts)], stdout=subprocess.PIPE, text=True)
        for n in range(parts)
    ]
    for process in running:
        said, _ = process.communicate()
        yield from map(json.loads, said.splitlines())


def report(seconds: float) -> bool:
    good: dict[int, dict[float, float]] = {}
    for index, share, found in results(seconds):
        good.setdefault(index, {})[share] = found
    settings = [Setting(*GRID[i], good[i]) for i in sorted(good)]
    print("prompt output  rate  TPOT obj.  together   apart  chosen")
    for each in settings:
        print(
            f"{each.load.prompt:6} {each.load.output:6} {each.rate:5.0f} "
            f"{each.load.tpot_s * 1e3:7.0f} ms {each.good[0.0]:8.1%} {each.apart:7.1%} "
            f"{each.good[PLANNERS_CHOICE]:7.1%}  {'right' if each.right else 'WRONG'}"
        )
    right = sum(each.right for each in settings) / len(settings)
    print(f"right in {right:.0%} of {len(settings)} settings; bar: {BAR:.0%} at least")
    return right >= BAR


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        number, parts = args.part
        part(number, parts, args.seconds)
        return 0
    return 0 if report(args.seconds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
