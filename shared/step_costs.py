"""What a decode step costs on a node, and how long it takes a model.

A node measures the costs when it starts, for each way in which it may run a step
(services/node/engine/rehearsal.py). It chooses by them how many processes run a model
(services/node/core/degrees.py). The planner chooses by them who runs a model that fits no device
(services/planner/core/ways.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

GAIN = 1.1
"""A choice with more processes, or more devices at a time, has to be faster by this factor.
Measurements are not exact, and each further process makes it a little more likely that one ends."""


class StepCosts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a decode step costs where `degree` processes run it together, with the threads of
    `devices` devices of the machine divided among them."""

    degree: int
    bytes_per_s: float
    """The rate at which all of them together read weights."""
    layer_s: float
    """Seconds in which they wait for each other in a layer."""
    step_s: float
    """Seconds until threads and processes have been called for a step."""
    devices: int = 1
    int8: bool = False
    """Whether weights of 8 bits are read."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decode step of a model, or of a part of it, has to do."""

    layers: int
    nbytes: int
    """Weights that a step reads."""
    heads: int
    """KV heads, whose number a degree has to divide."""
    alone: str = ""
    """Why only one process can run it, or should, in words; empty: nothing speaks against more."""


def decode_s(shape: Shape, costs: StepCosts) -> float:
    """Seconds of a step of one token."""
    return shape.nbytes / costs.bytes_per_s + shape.layers * costs.layer_s + costs.step_s


def able(shape: Shape, measured: Iterable[StepCosts], devices: int) -> list[StepCosts]:
    """The measured costs of all degrees in which `devices` devices can run the model, in ascending
    order of degree."""
    most = 1 if shape.alone else shape.heads
    found = (
        c for c in measured if c.devices == devices and 1 <= c.degree <= most and c.bytes_per_s > 0
    )
    return sorted((c for c in found if shape.heads % c.degree == 0), key=lambda c: c.degree)


def fastest(shape: Shape, measured: Iterable[StepCosts], devices: int) -> StepCosts | None:
    """The costs of the degree in which `devices` devices should run the model. None: no degree was
    measured."""
    best: StepCosts | None = None
    for costs in able(shape, measured, devices):
        if best is None or decode_s(shape, costs) * GAIN < decode_s(shape, best):
            best = costs
    return best
