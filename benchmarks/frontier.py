"""Who is better at equal cost: frontiers of TTFT p90 against device seconds, on recorded windows.

Run: `.venv/bin/python -m benchmarks.frontier --traces DIR [--seeds N] [--results FILE] [WINDOW]...`
A run takes 3 to 20 s of one core, and a window up to 84 runs for each seed. FILE keeps every run. A
run that is in it is not made again, so that the benchmark goes on where it was cut off. Take a new
file for a new tree.

Every system is a whole one, with its own scaler and gateway (docs/simulation.md), at several
settings: how long replicas are kept, how many always stay, and how full a replica is meant to be.
Two systems are compared on their frontiers, at equal device seconds: our TTFT p90 as a share of a
baseline's, at every point of the baseline's frontier. The bar is held against the point where we do
worst. Figures are medians over seeds, with the lowest and the highest.
"""

import argparse
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.machine import machine
from shared import telemetry
from shared.config import TelemetryConfig
from simulation.capacity import Capacity
from simulation.fit import fitting_factor, scale_rate
from simulation.frontier import Knobs, Point, by_system, frontier, ttft_at
from simulation.hardware import hardware
from simulation.measures import integral, percentiles
from simulation.models import model
from simulation.run import run_system
from simulation.setting import Setting
from simulation.systems import OWN
from simulation.traces import clip, read_trace, served_by, window
from simulation.variants import jittered, streams

OURS, IDEAL = "lambdascale", "ideal"
LOADING = (f"serverlessllm{OWN}", f"nccl{OWN}")
"""Systems that ours must beat by more where loads matter."""
PLATFORMS = (*LOADING, f"faasnet{OWN}", f"lambdapipe{OWN}")
BLITZSCALE = f"blitzscale{OWN}"
BASELINES = (*PLATFORMS, BLITZSCALE)
BAR, BAR_LOADING, BAR_IDEAL, IDEAL_MORE = 1.0, 0.8, 1.15, 1.1
TAIL_S = 30.0
"""Device seconds are counted until this long after the window's end, for every system."""
SLOTS = 16
KEPT_S = (2.0, 0.5)
TARGETS = (1.0, 0.75, 0.5, 0.35, 0.25, 0.125)
"""How full a replica is meant to be."""


@dataclass(frozen=True, slots=True)
class Window:
    name: str
    file: str
    seconds: float
    hardware: str = "h800-400g"
    architecture: str = "llama-2-13b"
    nodes: int = 6
    streams: int = 0
    """Models with a stream of their own each; 0: the trace's."""
    many: bool = False
    """Many models: none keeps a replica while idle, and each is on two disks."""
    loads: bool = False
    """Whether loads matter here."""
    near_ideal: bool = False
    """Whether ours is held against ideal."""


WINDOWS = (
    Window("azure-code", "window_azure2023_code.csv", 240, near_ideal=True),
    Window("burstgpt", "window_burstgpt1_30min.csv", 200, nodes=4, near_ideal=True),
    Window("azure-code-a100", "window_azure2023_code.csv", 240, "a100-100g", loads=True),
    Window(
        "27-models", "lmsys_arena27_rescaled_600s.csv", 300,
        architecture="llama-3.1-8b", many=True, loads=True,
    ),
    Window(
        "azure-code-8-models", "window_azure2023_code.csv", 240,
        architecture="llama-3.1-8b", streams=8, many=True, loads=True,
    ),
    Window("mooncake", "window_mooncake_conversation.csv", 180, nodes=4),
    Window("azure-conv", "window_azure2023_conv.csv", 90, nodes=4),
    Window("burstgpt-compressed", "window_burstgpt1_6h_div12.csv", 600, nodes=4),
)  # fmt: skip


def settings_of(at: Window, system: str) -> tuple[Knobs, ...]:
    """What a system is run with. All have the same settings, but that where there are many models,
    only ours and BlitzScale know how full a replica is meant to be. The least number of replicas is
    0 for many models."""
    if at.many:
        full = (1.0, 0.5) if system in (OURS, BLITZSCALE) else (1.0,)
        knobs = tuple(Knobs(kept_s, 0, full[0]) for kept_s in (0.5, 2.0, 8.0, 30.0))
        return (*knobs, *(Knobs(2.0, 0, each) for each in full[1:]))
    return tuple(Knobs(kept_s, 1, target) for kept_s, target in product(KEPT_S, TARGETS))


def setting(at: Window, folder: Path, seed: int) -> Setting:
    """The window's requests, fitted to its nodes."""
    read = window(read_trace(folder / at.file, seed=seed), 0.0, at.seconds)
    if at.streams:
        read = streams(read, at.streams, at.seconds)
    names = {name: name if at.many else at.architecture for name in read.models}
    node = Capacity(model(at.architecture), hardware(at.hardware), SLOTS)
    read = clip(served_by(read, names), dict.fromkeys(names.values(), node.model.context))
    factor = fitting_factor(
        read.rows, lambda row: node.work_s(row.prompt_tokens, row.output_tokens), at.nodes
    )
    if not at.many or factor < 1:  # many models are bound by memory, not by work
        read = scale_rate(read, factor, "fitted")
    read = jittered(read, seed)
    return Setting(
        trace=read.rows,
        models=tuple((name, at.architecture) for name in sorted(set(names.values()))),
        nodes=at.nodes,
        hardware=at.hardware,
        seed=seed,
        racks=1,
        slots=SLOTS,
        min_instances=0,
        workload=read.name,
        synthetic=False,
        notes=read.notes,
        disk_copies=2 if at.many else 0,
    )


# --- runs ------------------------------------------------------------------------------------


class Run(msgspec.Struct, frozen=True):
    window: str
    seed: int
    point: Point
    requests: int
    lost: int
    cpu_s: float


class Results:
    """The runs so far, kept in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.runs: list[Run] = []
        if path is not None and path.exists():
            lines = path.read_bytes().splitlines()
            self.runs = [msgspec.json.decode(line, type=Run) for line in lines]

    def find(self, at: Window, seed: int, system: str, knobs: Knobs) -> Run | None:
        wanted = (at.name, seed, system, knobs)
        return next(
            (r for r in self.runs if (r.window, r.seed, r.point.system, r.point.knobs) == wanted),
            None,
        )

    def add(self, run: Run) -> None:
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(run) + b"\n")


def simulate(at: Window, base: Setting, system: str, knobs: Knobs) -> Run:
    found = run_system(system, knobs.on(base), lambda _: None)
    p90 = percentiles(request.ttft_s for request in found.requests).p90
    device_s = integral(found, lambda sample: sample.gpus, at.seconds + TAIL_S)
    lost = sum(not request.completed for request in found.requests)
    point = Point(system, knobs, device_s, (p90 or float("inf")) / 1000)
    return Run(at.name, base.seed, point, len(found.requests), lost, found.cpu_s)


def run_window(at: Window, folder: Path, seed: int, results: Results) -> None:
    base = setting(at, folder, seed)
    for system in (OURS, IDEAL, *BASELINES):
        for knobs in settings_of(at, system):
            if results.find(at, seed, system, knobs) is None:
                results.add(simulate(at, base, system, knobs))


# --- what comes out --------------------------------------------------------------------------


def against(
    ours: Sequence[Point], theirs: Sequence[Point], more: float = 1.0
) -> tuple[float, float] | None:
    """Our TTFT as a share of theirs, with `more` times their device seconds: where they do worst
    and where they do best. A point that costs less than our cheapest counts only if it is better
    than that, too. None: there is no other."""
    shares = []
    for point in frontier(theirs):
        mine = ttft_at(ours, point.device_s * more)
        if mine is not None:
            shares.append(mine / point.ttft_s)
        elif ours and (cheapest := frontier(ours)[0]).ttft_s > point.ttft_s:
            shares.append(cheapest.ttft_s / point.ttft_s)
    return (min(shares), max(shares)) if shares else None


def spread(values: Iterable[float]) -> str:
    """The median, with the lowest and the highest."""
    known = list(values)
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{median(known):.2f} ({min(known):.2f} to {max(known):.2f})"


def report(at: Window, runs: Sequence[Run]) -> Iterator[str]:
    seeds = sorted({run.seed for run in runs})
    by_seed = {
        seed: by_system(run.point for run in runs if run.seed == seed and not run.lost)
        for seed in seeds
    }
    requests = median(run.requests for run in runs)
    yield (
        f"{at.name}: {at.file}, first {at.seconds:g} s, {requests:.0f} requests, {at.nodes} nodes "
        f"of {at.hardware}, {at.architecture}; seeds {', '.join(map(str, seeds))}"
    )
    head = f"{'kept, min, aim; full':>24}{'device s':>26}{'TTFT p90, s':>24}"
    yield f"  {'system':<18}{head}  lost"
    for (system, knobs), same in _grouped(runs).items():
        yield (
            f"  {system:<18}{f'{knobs.words}; {knobs.target:g}':>24}"
            f"{spread(run.point.device_s for run in same):>26}"
            f"{spread(run.point.ttft_s for run in same):>24}  {sum(run.lost for run in same)}"
        )
    for baseline in BASELINES:
        bar = BAR_LOADING if at.loads and baseline in LOADING else BAR
        found = [against(own.get(OURS, []), own.get(baseline, [])) for own in by_seed.values()]
        yield _claim(f"as a share of {baseline}'s", found, bar)
    if at.near_ideal:
        ideal = [
            against(own.get(OURS, []), own.get(IDEAL, []), IDEAL_MORE) for own in by_seed.values()
        ]
        yield _claim("with 10 % more device seconds, as a multiple of ideal's", ideal, BAR_IDEAL)
    yield ""


def _claim(what: str, found: Sequence[tuple[float, float] | None], bar: float) -> str:
    known = [each for each in found if each is not None]
    if not known:
        return f"  {what}: no point to compare"
    best, worst = ([each[side] for each in known] for side in (0, 1))
    met = median(worst) <= bar if bar != BAR else median(worst) < bar
    verdict = "met" if met else "NOT met"
    return f"  {what}: {spread(best)} at best, {spread(worst)} at worst; bar {bar:g}: {verdict}"


def _grouped(runs: Iterable[Run]) -> Mapping[tuple[str, Knobs], list[Run]]:
    """The runs of each system at each setting, the cheapest first."""
    order = (OURS, IDEAL, *BASELINES)
    found: dict[tuple[str, Knobs], list[Run]] = {}
    for run in sorted(runs, key=lambda r: (order.index(r.point.system), r.point.device_s)):
        found.setdefault((run.point.system, run.point.knobs), []).append(run)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.frontier", description=__doc__)
    names = [at.name for at in WINDOWS]
    parser.add_argument("windows", nargs="*", metavar="WINDOW", help=", ".join(names))
    parser.add_argument("--traces", type=Path, default=Path("traces"), metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--results", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if unknown := set(args.windows).difference(names):
        parser.error(f"no window {min(unknown)!r}: there are {', '.join(names)}")
    if os.environ.get("PYTHONHASHSEED") != "0":  # fixed, for the same figures every time
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.frontier", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    telemetry.configure("simulation", TelemetryConfig(log_level="off"))
    gc.freeze()
    gc.set_threshold(500_000)
    print(machine())
    results, chosen = Results(args.results), set(args.windows or names)
    for at in (each for each in WINDOWS if each.name in chosen):
        if not (args.traces / at.file).is_file():
            print(f"{at.name}: SKIPPED, there is no {args.traces / at.file}: see --traces")
            continue
        for seed in range(args.seeds):
            run_window(at, args.traces, seed, results)
        runs = [run for run in results.runs if run.window == at.name and run.seed < args.seeds]
        print("\n".join(report(at, runs)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
