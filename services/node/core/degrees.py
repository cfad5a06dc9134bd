"""How many processes (ranks of tensor parallelism) run a model, chosen by what a decode step costs.

A step of one token reads all weights once. However many processes share the node's threads, the
same threads read them. What differs is what the machine gives them (processes may have memory of
their own that is near to them), how much they wait for each other in a layer, and that they have to
be told of each step. All three are measured when the node starts (services/node/engine/rehearsal).

The planner may let all devices of a machine that hold parts of a model run each part together
(services/planner/core/ways.py). Then more threads read the same weights: those of all these
devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.step_costs import Shape, StepCosts, able, decode_s, fastest
from shared.wording import counted

MOST = 8
"""Processes. Each takes some 200 MB."""


@dataclass(frozen=True, slots=True)
class Choice:
    degree: int
    why: str


def degrees_for(threads: int) -> tuple[int, ...]:
    """The degrees above 1 that are tried with this number of threads, in ascending order. Each
    process needs a thread of its own."""
    return tuple(n for n in (1 << i for i in range(1, MOST.bit_length())) if n <= threads)


def choose(
    shape: Shape, measured: Sequence[StepCosts], loss: str = "", *, devices: int = 1
) -> Choice:
    """`measured`: for each degree that the node can run, among them 1. `loss`: why it can run no
    larger ones any more; empty: it can run as many as ever. `devices`: how many devices of the
    machine run the model together. `measured` has costs for this number of devices."""
    choice = _choose(shape, [c for c in measured if c.devices == devices], loss, devices)
    if devices == 1:
        return choice
    return Choice(choice.degree, f"{counted(devices, 'device')} run it together; {choice.why}")


def _choose(shape: Shape, measured: Sequence[StepCosts], loss: str, devices: int) -> Choice:
    if shape.alone:
        return Choice(1, shape.alone)
    if len(measured) == 1:
        return Choice(1, f"no others are left, since {loss}" if loss else "it has one thread")
    seconds = {costs.degree: decode_s(shape, costs) for costs in able(shape, measured, devices)}
    best = fastest(shape, measured, devices)
    if best is None or len(seconds) == 1:
        heads = counted(shape.heads, "KV head")
        return Choice(1, f"it has {heads}, which more processes do not divide evenly")
    said = ", ".join(f"{1e3 * s:.3g} ms with {n}" for n, s in seconds.items())
    fewer = f"; there were more before {loss}" if loss else ""
    return Choice(best.degree, f"a step of one token is expected to take {said}{fewer}")
