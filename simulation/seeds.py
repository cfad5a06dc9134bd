"""Plays the scenarios of many seeds: `python -m simulation.seeds COUNT [--first SEED] [--jobs N]`.

Prints each seed in which something was violated, with the command that replays it. The exit code is
1 if there was any.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator

from simulation.chaos import play
from simulation.scenario import scenario

A_LIFE = 100
"""Seeds that a process plays, so that what one leaves in memory does not add up."""
TELL_S = 30.0
"""Seconds between notes of how far it is."""


def violations(seed: int) -> tuple[int, tuple[str, ...]]:
    return seed, play(scenario(seed)).violations


def played(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """What was violated in each seed, in the order of the seeds."""
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=A_LIFE) as pool:
        yield from pool.imap(violations, seeds)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.seeds", description=__doc__)
    parser.add_argument("count", type=int, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (0)")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (one for each core)")
    given = parser.parse_args(arguments)
    began = told = time.monotonic()
    bad = 0
    for done, (seed, found) in enumerate(
        played(range(given.first, given.first + given.count), given.jobs), start=1
    ):
        if found:
            bad += 1
            print(f"seed {seed}: {found[0]}", flush=True)
            print(f"  and {len(found) - 1} more; to replay: python -m simulation.chaos {seed}")
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            print(f"{done} of {given.count} seeds, {bad} bad", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(f"{given.count} seeds from {given.first} on in {seconds:.0f} s: {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
