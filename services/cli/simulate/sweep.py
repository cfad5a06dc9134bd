"""`lambdascale simulate --sweep`: what a better TTFT costs in device seconds."""

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.cli.arguments import amount_or_zero, whole

if TYPE_CHECKING:
    from simulation.frontier import Point
    from simulation.measures import Objective
    from simulation.results import SystemRun
    from simulation.setting import Setting

DEFAULT = "2,8,30:0,1:0,500,1000"
Grid = tuple[tuple[float, ...], tuple[int, ...], tuple[float | None, ...]]


def grid(text: str) -> Grid:
    """The keep-alive times, numbers of instances and objectives of `S,...:N,...[:MS,...]`.
    ArgumentTypeError."""
    times, *others = text.split(":")
    if len(others) not in (1, 2):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give keep-alive times in seconds, numbers of instances, and TTFT "
            f"objectives in ms or none of these, as in {DEFAULT}"
        )
    aims = others[1].split(",") if len(others) == 2 else ()
    return (
        tuple(amount_or_zero(each) for each in times.split(",")),
        tuple(whole(each) for each in others[0].split(",")),
        tuple(amount_or_zero(each) for each in aims) or (None,),
    )


def sweep(
    setting: "Setting",
    chosen: Grid,
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
        say(f"point {number + 1} of {len(every)}: {knobs.words}")
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
