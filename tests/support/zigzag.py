"""Live scaling of an overloaded instance, batch by batch: who runs how many layers of each.

BlitzScale, section 5.2. A source with all layers has batches to run; a target that is loading the
same layers, first to last, runs the first ones of a batch, and the source the rest. The paper
chooses the split by an integer programme (whose C2 and C3, as printed, skip the first batch). No
programme is needed: the greedy rule of `zigzag` is its optimum wherever that could be computed.

Time is counted in layer-executions, all batches alike and there at time 0. The target has its
first layer at time 0 and one more after every `load`.
"""

from dataclasses import dataclass

from shared.errors import BadInput


@dataclass(frozen=True)
class Assignment:
    """What becomes of the batches, in their order."""

    on_target: tuple[int, ...]
    """How many layers of each batch the target runs: the first ones."""
    finish: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.finish) / len(self.finish)


def zigzag(batches: int, layers: int, load: int) -> Assignment:
    """The target runs the next loaded layer of the earliest batch; an idle source pulls the
    earliest batch, even an untouched one.

    Both choose at the same moment, the source first. BadInput for counts below 1.
    """
    _check(batches, layers, load)
    on_target, finish = [0] * batches, [0] * batches
    waiting = list(range(batches))
    time = source_free = 0
    while waiting:
        if time >= source_free:
            batch = waiting.pop(0)
            finish[batch] = source_free = time + layers - on_target[batch]
        loaded = min(layers, time // load + 1)
        batch = next((b for b in waiting if on_target[b] < loaded), -1)
        time += 1
        if batch >= 0:
            on_target[batch] += 1
            if on_target[batch] == layers:
                waiting.remove(batch)
                finish[batch] = time
    return Assignment(tuple(on_target), tuple(finish))


def best_effort(batches: int, layers: int, load: int) -> Assignment:
    """What the rule is to beat: the target runs of each batch in turn all layers that it has
    loaded, and hands it over; the source takes only what was handed over, in order.
    """
    _check(batches, layers, load)
    on_target, finish = [0] * batches, [0] * batches
    time = source_free = 0
    for batch in range(batches):
        while on_target[batch] < min(layers, time // load + 1):
            on_target[batch] += 1
            time += 1
        finish[batch] = source_free = max(time, source_free) + layers - on_target[batch]
    return Assignment(tuple(on_target), tuple(finish))


def _check(batches: int, layers: int, load: int) -> None:
    if min(batches, layers, load) < 1:
        raise BadInput(
            f"{batches} batches of {layers} layers, each loaded in {load}: all must be at least 1"
        )
