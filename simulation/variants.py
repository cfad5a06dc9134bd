"""Other workloads made from a recorded one: the same with small chances changed, and one for each
of many models. What was done is said in the workload's notes."""

import random
from collections.abc import Sequence
from dataclasses import replace

from shared.errors import BadInput
from simulation.traces import Row, Workload

JITTER_S = 0.25
"""How far an arrival moves at most, either way: too little to change the shape of a burst, enough
to change which requests meet."""


def jittered(workload: Workload, seed: int) -> Workload:
    """The workload with every arrival moved by chance. Seed 0 changes nothing."""
    if not seed:
        return workload
    chance = random.Random(f"jitter of {seed}")
    moved = (
        row._replace(arrival_s=max(0.0, row.arrival_s + chance.uniform(-JITTER_S, JITTER_S)))
        for row in workload.rows
    )
    rows = tuple(sorted(moved, key=lambda row: row.arrival_s))
    note = f"arrivals moved by up to {JITTER_S:g} s either way (seed {seed})"
    return replace(workload, rows=rows, notes=(*workload.notes, note))


def streams(workload: Workload, count: int, length_s: float) -> Workload:
    """`count` models, each with the whole workload as its own stream. The i-th stream begins at
    i / count of the length and wraps around; so the sum is smoother than its parts, and each part
    keeps its bursts. BadInput if a request comes after the length, or there is not one stream."""
    if count < 1:
        raise BadInput(f"{count} streams: there must be at least 1")
    last = workload.rows[-1].arrival_s
    if last >= length_s:
        raise BadInput(f"a request comes at {last:g} s, the streams are {length_s:g} s long")
    made: list[Row] = []
    for index, name in enumerate(_names(count)):
        shift = length_s * index / count
        made += (
            row._replace(arrival_s=(row.arrival_s - shift) % length_s, model=name)
            for row in workload.rows
        )
    rows = tuple(sorted(made, key=lambda row: row.arrival_s))
    note = f"{count} models, each with the whole window as its own stream, shifted in time"
    return replace(workload, rows=rows, notes=(*workload.notes, note))


def _names(count: int) -> Sequence[str]:
    return [f"stream-{index:0{len(str(count - 1))}}" for index in range(count)]
