"""`lambdascale simulate --sweep`: what a better TTFT costs in device seconds."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from services.cli.arguments import amount_or_zero, whole

if TYPE_CHECKING:
    from simulation.frontier import Point
    from simulation.measures import Objective
    from simulation.results import SystemRun
    from simulation.setting import Setting

DEFAULT = "0.5,2,8,30:0,1,2"


def grid(text: str) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The keep-alive times and numbers of instances of `S,...:N,...`. ArgumentTypeError."""
    times, colon, buffers = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give keep-alive times in seconds and numbers of instances, as in {DEFAULT}"
        )
    return (
        tuple(amount_or_zero(each) for each in times.split(",")),
        tuple(whole(each) for each in buffers.split(",")),
    )


def sweep(
    setting: "Setting",
    chosen: tuple[Iterable[float], Iterable[int]],
    simulate: "Callable[[Setting], Mapping[str, SystemRun]]",
    objective: "Objective",
    say: Callable[[str], None],
) -> "list[Point]":
    """Every system at every point. Points at which requests failed are left out, and said."""
    from simulation.frontier import all_knobs, point
    from simulation.measures import measure

    found: list[Point] = []
    every = all_knobs(*chosen, setting.target)
    for number, knobs in enumerate(every):
        say(f"point {number + 1} of {len(every)}: kept for {knobs.keep_alive_s:g} s, "
            f"at least {knobs.min_instances} instances")  # fmt: skip
        runs = simulate(knobs.on(setting))
        end_s = max(run.virtual_s for run in runs.values())
        for system, run in runs.items():
            measures = measure(run, objective, end_s)
            each = point(system, knobs, measures)
            if each is None:
                done = f"{measures.completed} of {measures.requests}"
                say(f"{system} at {knobs.words} is left out: it completed {done} requests")
            else:
                found.append(each)
    return found
