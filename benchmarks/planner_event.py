"""What a large scaling event costs the planner's core, without the noise of the machine.

Run: `.venv/bin/python -m benchmarks.planner_event --nodes 1000`. `bench control-plane` plays an
event once, and what the planner's core is told is recorded. Then a new core is told the same, again
and again. So the number of function calls is the same each time, and of the processor times of each
kind of stimulus the least counts. Plans and paths are computed, too. What the bus and the tasks of
the planner's shell take is left out.

The event's window begins with the request for it. What the window before it took, with as many
seconds of steady load, is subtracted.
"""

import argparse
import copy
import cProfile
import gc
import pstats
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import getloadavg
from time import thread_time_ns
from typing import ClassVar

from benchmarks.control_plane import bench, results
from services.planner.core import commands, instances
from services.planner.core.archive import Archive
from services.planner.core.commands import Command
from services.planner.core.desk import Settings
from services.planner.core.part_plans import plan_parts
from services.planner.core.planner import Planner
from services.planner.core.stimuli import Asked, Stimulus
from services.planner.core.tickets import Moment
from services.planner.service import PlannerService

WINDOW_S = 6.0
"""The event and what follows from it."""
PLANS = "plans and paths"
Told = Sequence[tuple[Stimulus, Moment]]


@dataclass
class Recording:
    settings: Settings
    archive: Archive
    """As it was when the core began."""
    ids: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)
    told: list[tuple[Stimulus, Moment]] = field(default_factory=list)

    def core(self) -> Planner:
        """A new core, which makes the ids that the recorded one made."""
        ids, traces = iter(self.ids), iter(self.traces)
        settings = replace(
            self.settings, new_id=lambda _: next(ids), new_trace=lambda: next(traces)
        )
        return Planner(settings, copy.deepcopy(self.archive))

    def windows(self) -> tuple[Told, Told, Told]:
        """What the core is told before both windows, in the steady one, and in the event's."""
        begins = next(i for i, (said, _) in enumerate(self.told) if isinstance(said, Asked))
        at = self.told[begins][1].at
        first = next(i for i, (_, now) in enumerate(self.told) if now.at >= at - WINDOW_S)
        ends = next(i for i, (_, now) in enumerate(self.told) if now.at >= at + WINDOW_S)
        return self.told[:first], self.told[first:begins], self.told[begins:ends]


class Recorded(Planner):
    made: ClassVar[list[Recording]] = []

    def __init__(self, settings: Settings, archive: Archive) -> None:
        self._recording = recording = Recording(settings, copy.deepcopy(archive))
        self.made.append(recording)

        def new_id(prefix: str) -> str:
            recording.ids.append(settings.new_id(prefix))
            return recording.ids[-1]

        def new_trace() -> str:
            recording.traces.append(settings.new_trace())
            return recording.traces[-1]

        super().__init__(replace(settings, new_id=new_id, new_trace=new_trace), archive)

    def handle(self, stimulus: Stimulus, now: Moment) -> list[Command]:
        self._recording.told.append((stimulus, now))
        return super().handle(stimulus, now)


class RecordedService(PlannerService):
    core_type = Recorded


def record(nodes: int) -> Recording:
    settings = results.Settings(nodes=(nodes,), models=100, gateways=100, window_s=WINDOW_S)
    bench.measure(settings, lambda text: print(text, file=sys.stderr), RecordedService)
    (recording,) = Recorded.made
    return recording


def _compute(asked: Iterable[Command]) -> None:
    """What the shell computes for the core. The recording has the results."""
    for each in asked:
        if isinstance(each, commands.PlanPaths):
            instances.plan(each.previous, each.members, each.rules)
        elif isinstance(each, commands.MakePlan):
            plan_parts(
                each.roles,
                each.held,
                each.model,
                each.links,
                strategy=each.strategy,
                executing=each.executing,
                max_stages=each.max_stages,
            )


def _tell(core: Planner, told: Told) -> Counter[str]:
    """Processor time in ns, by kind of stimulus."""
    spent = Counter[str]()
    for stimulus, now in told:
        since = thread_time_ns()
        asked = core.handle(stimulus, now)
        handled = thread_time_ns()
        _compute(asked)
        spent[type(stimulus).__name__] += handled - since
        spent[PLANS] += thread_time_ns() - handled
    return spent


def _calls(core: Planner, told: Told) -> int:
    profile = cProfile.Profile()
    profile.enable()
    for stimulus, now in told:
        _compute(core.handle(stimulus, now))
    profile.disable()
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_event",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=1000, help="number of nodes (1000)")
    parser.add_argument("--times", type=int, default=5, help="how often it is replayed (5)")
    args = parser.parse_args()
    recording = record(args.nodes)
    before, steady, event = recording.windows()
    gc.collect()
    gc.disable()
    core = recording.core()
    for stimulus, now in before:
        core.handle(stimulus, now)
    calls = -_calls(core, steady) + _calls(core, event)
    least: tuple[dict[str, int], dict[str, int]] = {}, {}
    for _ in range(args.times):
        core = recording.core()
        for stimulus, now in before:
            core.handle(stimulus, now)
        for known, told in zip(least, (steady, event), strict=True):
            for kind, ns in _tell(core, told).items():
                known[kind] = min(known.get(kind, ns), ns)
    spent = {kind: (ns - least[0].get(kind, 0)) / 1e9 for kind, ns in least[1].items()}
    load = ", ".join(f"{each:.1f}" for each in getloadavg())
    print(f"{args.nodes} nodes: {calls:,} function calls; {sum(spent.values()):.3f} s of processor")
    for kind in sorted(spent, key=spent.__getitem__, reverse=True):
        print(f"  {kind:<16} {spent[kind]:7.3f} s")
    print(f"load {load}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
