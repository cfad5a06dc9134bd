"""`lambdascale simulate`: systems side by side on one workload, in virtual time."""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from services.cli.client import ended_by_signals, print_json, say
from services.cli.simulate import arguments
from services.cli.simulate.sweep import sweep
from shared.errors import BadInput
from simulation.systems import COMPARED

if TYPE_CHECKING:
    from simulation.measures import Objective
    from simulation.results import SystemRun
    from simulation.setting import Setting


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    arguments.add_parser(subparsers).set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the comparison. BadInput or ConfigError for what cannot be simulated."""
    if args.from_s >= args.until_s:
        raise BadInput(f"--from {args.from_s:g} is not before --until {args.until_s:g}")
    if args.streams and math.isinf(args.until_s):
        raise BadInput("--streams needs --until: the streams wrap around there")
    # Imported here, because numpy and torch take a while and other commands do not need them.
    from services.cli.simulate.setting import from_arguments
    from simulation.measures import measure_all
    from simulation.report import comparison, document, words

    setting, objective = from_arguments(args)
    if not args.json:
        _print([*words(setting), f"SLO: {objective.words}", ""])
    systems = args.systems or (COMPARED if args.sweep is None else COMPARED[:1])

    def simulate(setting: "Setting") -> "dict[str, SystemRun]":
        return asyncio.run(_simulate(setting, systems, args.jobs))

    if args.sweep is not None:
        return _sweep(args, setting, simulate, objective)
    runs = simulate(setting)
    measured = measure_all(runs, objective)
    if args.plots:
        from simulation.figures import draw_all

        for path in draw_all(args.plots, setting, runs):
            say(f"drew {path}")
    if args.json:
        print_json(document(setting, objective.words, measured))
    else:
        _print(comparison(measured))
    return 0


def _sweep(
    args: argparse.Namespace,
    setting: "Setting",
    simulate: "Callable[[Setting], Mapping[str, SystemRun]]",
    objective: "Objective",
) -> int:
    from simulation.frontier import lines, swept

    points = sweep(setting, args.sweep, simulate, objective, say)
    if args.plots:
        from simulation.figures import draw_frontier

        say(f"drew {draw_frontier(args.plots, setting, points)}")
    if args.json:
        print_json(swept(setting, points))
    else:
        _print(lines(points))
    return 0


async def _simulate(
    setting: "Setting", systems: Sequence[str], jobs: int
) -> "dict[str, SystemRun]":
    from simulation.launch import run_all

    with ended_by_signals():
        return await run_all(setting, systems, jobs=jobs, tell=say)


def _print(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()
