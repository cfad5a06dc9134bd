"""The workload, cluster and objectives that the arguments of `lambdascale simulate` ask for.

Importing this takes a while, because it imports numpy and torch.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from services.cli.simulate.arguments import EACH, FIT, SLO_FACTOR
from shared.errors import BadInput
from simulation.capacity import Capacity
from simulation.fit import PEAK_WINDOW_S, fitting_factor, scale_rate
from simulation.hardware import hardware
from simulation.measures import Objective
from simulation.models import model
from simulation.results import RequestResult
from simulation.setting import Setting
from simulation.synthetic import is_synthetic, synthesize
from simulation.traces import Row, Workload, clip, read_trace, served_by, window
from simulation.variants import jittered, streams


def from_arguments(args: argparse.Namespace) -> tuple[Setting, Objective]:
    """BadInput or ConfigError for what cannot be simulated."""
    workload = _workload(args)
    each = args.streams and "=" not in args.model
    serves = _serves(f"{EACH}={args.model}" if each else args.model, workload.models)
    capacities = _capacities(args, serves)
    setting = _setting(args, workload, serves, capacities)
    return setting, _objective(args.slo_ttft_ms, args.slo_tpot_ms, capacities)


def _workload(args: argparse.Namespace) -> Workload:
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
) -> dict[str, Capacity]:
    """Capacities, by the name of a model that serves."""
    node = hardware(args.hardware)
    return {
        name: Capacity(model(architecture, name), node, args.slots)
        for name, architecture in sorted(set(serves.values()))
    }


def _setting(
    args: argparse.Namespace,
    workload: Workload,
    serves: Mapping[str, tuple[str, str]],
    capacities: Mapping[str, Capacity],
) -> Setting:
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
    args: argparse.Namespace, rows: Iterable[Row], capacities: Mapping[str, Capacity]
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
    ttft_ms: float | None, tpot_ms: float | None, capacity: Capacity, prompt: int, output: int
) -> tuple[float, float]:
    """What a request of this length may take, in seconds: for TTFT and for TPOT."""
    return (
        SLO_FACTOR * capacity.prefill_s(prompt) if ttft_ms is None else ttft_ms / 1000,
        SLO_FACTOR * capacity.step_s(1, prompt + output // 2)
        if tpot_ms is None
        else tpot_ms / 1000,
    )


def _objective(
    ttft_ms: float | None, tpot_ms: float | None, capacities: Mapping[str, Capacity]
) -> Objective:
    idle = f"{SLO_FACTOR:g} x that of an idle node"

    def slo(request: RequestResult) -> tuple[float, float]:
        lengths = request.prompt_tokens, request.output_tokens
        return _slo(ttft_ms, tpot_ms, capacities[request.model], *lengths)

    return Objective(
        lambda request: slo(request)[0],
        lambda request: slo(request)[1],
        f"TTFT {idle if ttft_ms is None else f'{ttft_ms:g} ms'}, "
        f"TPOT {idle if tpot_ms is None else f'{tpot_ms:g} ms'}",
    )
