"""How many processes (ranks of tensor parallelism) run a model, chosen by what a decode step costs.

A step of one token reads all weights once. However many processes share the node's threads, the
same threads read them. What differs is what the machine gives them (processes may have memory of
their own that is near to them), how much they wait for each other in a layer, and that they have to
be told of each step. All three are measured when the node starts (services/node/engine/rehearsal).
"""

from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 1.1
"""A larger number of processes has to be faster by this factor than a smaller one. Measurements are
not exact, and each further process makes it a little more likely that one of them ends."""
MOST = 8
"""Processes. Each takes some 200 MB."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a decode step costs where `degree` processes run it together, with the node's threads
    divided among them."""

    degree: int
    bytes_per_s: float
    """The rate at which all of them together read weights."""
    layer_s: float
    """Seconds in which they wait for each other in a layer."""
    step_s: float
    """Seconds until threads and processes have been called for a step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decode step of a model has to do."""

    layers: int
    nbytes: int
    """Weights that a step reads."""
    heads: int
    """KV heads, whose number a degree has to divide."""
    alone: str = ""
    """Why only one process can run it, or should, in words; empty: nothing speaks against more."""


@dataclass(frozen=True, slots=True)
class Choice:
    degree: int
    why: str


def degrees_for(threads: int) -> tuple[int, ...]:
    """The degrees above 1 that are tried on a node with this number of threads, in ascending
    order. Each process needs a thread of its own."""
    return tuple(n for n in (1 << i for i in range(1, MOST.bit_length())) if n <= threads)


def decode_s(shape: Shape, costs: Costs) -> float:
    """Seconds of a step of one token through the whole model."""
    return shape.nbytes / costs.bytes_per_s + shape.layers * costs.layer_s + costs.step_s


def choose(shape: Shape, measured: Sequence[Costs], loss: str = "") -> Choice:
    """`measured`: for each degree that the node can run, among them 1. `loss`: why it can run no
    larger ones any more; empty: it can run as many as ever."""
    if shape.alone:
        return Choice(1, shape.alone)
    if loss and len(measured) == 1:
        return Choice(1, f"no others are left, since {loss}")
    able = sorted((c for c in measured if shape.heads % c.degree == 0), key=lambda c: c.degree)
    seconds = {costs.degree: decode_s(shape, costs) for costs in able}
    if len(seconds) == 1:
        heads = "1 KV head" if shape.heads == 1 else f"{shape.heads} KV heads"
        return Choice(1, f"it has {heads}, which more processes do not divide evenly")
    best = 1
    for degree in seconds:
        if seconds[degree] * GAIN < seconds[best]:
            best = degree
    said = ", ".join(f"{1e3 * s:.3g} ms with {n}" for n, s in seconds.items())
    fewer = f"; there were more before {loss}" if loss else ""
    return Choice(best, f"a step of one token is expected to take {said}{fewer}")
