"""`lambdascale simulate`: systems side by side on one workload, in virtual time."""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.arguments import amount, amount_or_zero, count, whole
from services.cli.client import absolute, add_json_option, ended_by_signals, print_json, say
from services.cli.sweep import DEFAULT, grid, sweep
from shared.errors import BadInput
from simulation.systems import COMPARED, SYSTEMS

if TYPE_CHECKING:
    from simulation.capacity import Capacity
    from simulation.measures import Objective
    from simulation.results import RequestResult, SystemRun
    from simulation.setting import Setting
    from simulation.traces import Row, Workload

FIT = "fit"
EACH = "*"
SLO_FACTOR = 5.0
DATA = Path(__file__).parents[2] / "simulation" / "data"
DESCRIPTION = """\
Replays a workload on a cluster of modelled nodes, once for each system, and compares what their
clients and their operators saw: latencies, requests served in time, accelerators held, memory.
The control plane is the real one, on a clock that skips the waiting. Links, memory and
accelerators are models of the named hardware. The same arguments give the same numbers.

systems (--systems):
{systems}

models:   {models}
hardware: {hardware}

workloads (--trace):
  FILE                            a recorded trace as its publishers give it (Azure LLM inference
                                  CSV, BurstGPT CSV, Mooncake JSON lines), or a CSV with the header
                                  arrival_s,prompt_tokens,output_tokens,model
  spike:rate=20,seconds=30        nothing for idle=5 s, then 20 requests a second (Poisson)
  gamma:rate=4,cv=8,seconds=600   bursts: gaps of a Gamma distribution
  poisson:rate=4,seconds=600      no bursts
  hourly:file=FILE,day=9          from counts by hour (day,hour,...), column=all, compress=1
  The last four are synthetic and take prompt=1024,output=128 (tokens) as well, and
  models=1,skew=0: each request is for one of this many models, the n-th with a frequency of
  1 / n^skew.
"""
EXAMPLES = """\
examples:
  lambdascale simulate --trace spike:rate=30,seconds=20 --systems lambdascale,serverlessllm
  lambdascale simulate --trace AzureLLMInferenceTrace_code.csv --nodes 12 --plots figures --jobs 4
  lambdascale simulate --trace AzureLLMInferenceTrace_code.csv --until 300 --sweep --plots figures
  lambdascale simulate --trace both.csv --model code=llama-2-7b,chat=llama-2-13b --until 600
  lambdascale simulate --trace poisson:rate=50,seconds=20,models=100,skew=1 --nodes 1000 \\
      --racks 50 --model '*=llama-3.1-8b' --systems lambdascale   (a minute or two, 2.2 GB)
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="compare systems on a recorded workload, in virtual time",
        description=DESCRIPTION.format(
            systems="\n".join(f"  {s.name:<18} {s.what}" for s in SYSTEMS.values()),
            models=_known("models"),
            hardware=_known("hardware"),
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_workload(parser)
    _add_cluster(parser)
    slo = parser.add_argument_group(
        "SLO", f"by default {SLO_FACTOR:g} times what a request of its length takes on an idle node"
    )
    slo.add_argument("--slo-ttft-ms", type=amount, metavar="MS", help="time to the first token")
    slo.add_argument(
        "--slo-tpot-ms", type=amount, metavar="MS", help="time of each token after the first"
    )
    parser.add_argument(
        "--sweep", type=grid, nargs="?", const=grid(DEFAULT), metavar="S,...:N,...[:MS,...]",
        help="simulate every combination of keep-alive times, numbers of instances that stay, and "
        "objectives for TTFT (0: none; not given: the SLO), and show the frontier: TTFT p90 "
        "against device seconds. Only of lambdascale, unless --systems names others (default "
        f"combinations: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="systems simulated at once (1)"
    )
    parser.add_argument(
        "--plots", type=absolute, metavar="DIR", help="draw the comparison: PNGs in this directory"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def _known(kind: str) -> str:
    return ", ".join(sorted(path.stem for path in (DATA / kind).glob("*.toml")))


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--trace", required=True, metavar="FILE|KIND:...", help="the workload, see above"
    )
    group.add_argument(
        "--from", dest="from_s", type=amount_or_zero, default=0.0, metavar="S",
        help="begin at this second of the trace (0)",
    )  # fmt: skip
    group.add_argument(
        "--until", dest="until_s", type=amount_or_zero, default=math.inf, metavar="S",
        help="end before this second of the trace",
    )  # fmt: skip
    group.add_argument(
        "--rate-factor", type=_factor, metavar=f"F|{FIT}",
        help=f"thins requests (below 1) or copies them (above 1) without stretching time; {FIT}: "
        f"the peak just fits when every node serves (default: {FIT}; 1 for synthetic workloads)",
    )  # fmt: skip
    group.add_argument(
        "--streams", type=count, default=0, metavar="N",
        help="N models, each with all these requests as its own stream; the streams are shifted "
        "in time and wrap around, so --until is needed",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0,
        help="seed of everything random. 0, the default: the trace as it was recorded, on equal "
        "disks. Others move arrivals a little and make some disks slower",
    )  # fmt: skip


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--systems",
        type=_systems,
        metavar="A,B,...",
        help=f"systems (default: {','.join(COMPARED)})",
    )
    group.add_argument(
        "--model", default="llama-2-13b", metavar="MODEL|NAME=MODEL,...",
        help="the model that serves every request, or one for each model of the trace; "
        f"{EACH}=MODEL: every other model of the trace is a model of its own, of this "
        "architecture (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--nodes", type=count, default=12, metavar="N", help="nodes (default: %(default)s)"
    )
    group.add_argument(
        "--racks", type=count, default=1, metavar="N", help="racks (default: %(default)s)"
    )
    group.add_argument(
        "--hardware",
        default="h800-400g",
        metavar="NAME",
        help="hardware of every node (default: %(default)s)",
    )
    group.add_argument(
        "--slots", type=count, default=32, metavar="N",
        help="requests that a complete node runs at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--disk-copies", type=whole, default=0, metavar="N",
        help="disks that have each model at the beginning; systems that load from local disks have "
        "it on all (default: 0: all)",
    )  # fmt: skip
    group.add_argument(
        "--keep-alive", type=amount_or_zero, default=2.0, metavar="S",
        help="seconds for which a replica is kept that is not needed (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--target", type=_share, metavar="SHARE",
        help="the share of a replica that the load is meant to fill (default: 1 with our scaler, "
        "0.5 with others)",
    )  # fmt: skip
    group.add_argument(
        "--min-instances", type=whole, default=1, metavar="N",
        help="replicas of each model that stay when nobody asks for it; 0: the model sleeps "
        "until somebody does (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the comparison. BadInput or ConfigError for what cannot be simulated."""
    if args.from_s >= args.until_s:
        raise BadInput(f"--from {args.from_s:g} is not before --until {args.until_s:g}")
    if args.streams and math.isinf(args.until_s):
        raise BadInput("--streams needs --until: the streams wrap around there")
    # Imported here, because numpy and torch take a while and other commands do not need them.
    from simulation.measures import measure_all
    from simulation.report import comparison, document, words

    workload = _workload(args)
    each = args.streams and "=" not in args.model
    serves = _serves(f"{EACH}={args.model}" if each else args.model, workload.models)
    capacities = _capacities(args, serves)
    objective = _objective(args.slo_ttft_ms, args.slo_tpot_ms, capacities)
    setting = _setting(args, workload, serves, capacities)
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


# --- the setting ------------------------------------------------------------


def _workload(args: argparse.Namespace) -> "Workload":
    from simulation.synthetic import is_synthetic, synthesize
    from simulation.traces import read_trace, window
    from simulation.variants import jittered, streams

    if is_synthetic(args.trace):
        made = window(synthesize(args.trace, seed=args.seed), args.from_s, args.until_s)
    else:
        path = Path(args.trace).expanduser()
        made = window(read_trace(path, seed=args.seed), args.from_s, args.until_s)
    if args.streams:
        made = streams(made, args.streams, args.until_s - args.from_s)
    return made if made.synthetic else jittered(made, args.seed)


def _serves(text: str, traced: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The (name of the model, architecture) that serves each of the trace's models."""
    if "=" not in text:
        return dict.fromkeys(traced, (text, text))
    given = dict(pair.partition("=")[::2] for pair in text.split(","))
    unknown = sorted(given.keys() - {EACH, *traced})
    if unknown or "" in given.values():
        raise BadInput(
            f"--model {text}: the trace's models are {', '.join(traced)}"
            + (f"; none is {', '.join(unknown)}" if unknown else ", each needs one that serves it")
        )
    missing = [name for name in traced if name not in given and EACH not in given]
    if missing:
        raise BadInput(
            f"--model {text} says nothing about {', '.join(missing)}: name them, or {EACH}=MODEL"
        )
    return {name: (name, given.get(name) or given[EACH]) for name in traced}


def _capacities(
    args: argparse.Namespace, serves: Mapping[str, tuple[str, str]]
) -> "dict[str, Capacity]":
    """Capacities, by the name of a model that serves."""
    from simulation.capacity import Capacity
    from simulation.hardware import hardware
    from simulation.models import model

    node = hardware(args.hardware)
    return {
        name: Capacity(model(architecture, name), node, args.slots)
        for name, architecture in sorted(set(serves.values()))
    }


def _setting(
    args: argparse.Namespace,
    workload: "Workload",
    serves: Mapping[str, tuple[str, str]],
    capacities: "Mapping[str, Capacity]",
) -> "Setting":
    from simulation.fit import PEAK_WINDOW_S, fitting_factor, scale_rate
    from simulation.setting import Setting
    from simulation.traces import clip, served_by

    served = served_by(workload, {traced: name for traced, (name, _) in serves.items()})
    served = clip(served, {name: capacity.model.context for name, capacity in capacities.items()})
    asked: float | str = args.rate_factor or (1.0 if workload.synthetic else FIT)
    if isinstance(asked, float):
        served = scale_rate(served, asked, "as asked")
    else:
        factor = fitting_factor(
            served.rows,
            lambda row: capacities[row.model].work_s(row.prompt_tokens, row.output_tokens),
            args.nodes,
        )
        why = f"so that the peak of {PEAK_WINDOW_S:g} s just fits when every node serves"
        served = scale_rate(served, factor, why)
    return Setting(
        trace=served.rows,
        models=tuple(sorted(set(serves.values()))),
        nodes=args.nodes,
        hardware=args.hardware,
        racks=args.racks,
        slots=args.slots,
        min_instances=args.min_instances,
        seed=args.seed,
        keep_alive_s=args.keep_alive,
        target=args.target,
        disk_copies=args.disk_copies,
        workload=served.name,
        synthetic=served.synthetic,
        notes=served.notes,
        objectives=_objectives(args, served.rows, capacities),
    )


def _objectives(
    args: argparse.Namespace, rows: "Iterable[Row]", capacities: "Mapping[str, Capacity]"
) -> tuple[tuple[str, float, float], ...]:
    """The SLO as the objectives that the planner is told: for each model that of its mean
    request."""
    lengths: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        lengths.setdefault(row.model, []).append((row.prompt_tokens, row.output_tokens))
    found = []
    for name, each in sorted(lengths.items()):
        prompt, output = (sum(column) // len(each) for column in zip(*each, strict=True))
        ttft_s, tpot_s = _slo(args.slo_ttft_ms, args.slo_tpot_ms, capacities[name], prompt, output)
        found.append((name, ttft_s, tpot_s))
    return tuple(found)


def _slo(
    ttft_ms: float | None, tpot_ms: float | None, capacity: "Capacity", prompt: int, output: int
) -> tuple[float, float]:
    """What a request of this length may take, in seconds: for TTFT and for TPOT."""
    return (
        SLO_FACTOR * capacity.prefill_s(prompt) if ttft_ms is None else ttft_ms / 1000,
        SLO_FACTOR * capacity.step_s(1, prompt + output // 2)
        if tpot_ms is None
        else tpot_ms / 1000,
    )


def _objective(
    ttft_ms: float | None, tpot_ms: float | None, capacities: "Mapping[str, Capacity]"
) -> "Objective":
    from simulation.measures import Objective

    idle = f"{SLO_FACTOR:g} x that of an idle node"

    def slo(request: "RequestResult") -> tuple[float, float]:
        lengths = request.prompt_tokens, request.output_tokens
        return _slo(ttft_ms, tpot_ms, capacities[request.model], *lengths)

    return Objective(
        lambda request: slo(request)[0],
        lambda request: slo(request)[1],
        f"TTFT {idle if ttft_ms is None else f'{ttft_ms:g} ms'}, "
        f"TPOT {idle if tpot_ms is None else f'{tpot_ms:g} ms'}",
    )


# --- arguments --------------------------------------------------------------


def _systems(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no system {unknown[0]!r}; there are {', '.join(SYSTEMS)}"
        )
    return names


def _share(text: str) -> float:
    share = amount(text)
    if share > 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at most 1")
    return share


def _factor(text: str) -> float | str:
    return FIT if text == FIT else amount(text)
