"""How many sequences instances and nodes take. By this one rule the planner grants slots, gateways
route, and the nodes of a path admit, its leader and the others (`services.node.core.room`, where a
node also counts KV).

A node has a number of slots for a model: the sequences that it runs at once as a complete replica.
On a path of S stages a token takes about S passes, and a node is busy with it in one of them, for
its stage's share of the model. So a sequence takes share / S of a slot on each node of its path.
(The nodes of a group have no more than their parts to run: there a token takes the time of one pass
in all, and g devices take g times the slots of one.)

The planner grants an instance as many sequences as fill the part of its nodes that is meant for it.
Nodes may differ in slots and in speed. A node of half the speed has half the capacity, but as many
sequences at once: it holds each of them for twice as long (Little's law).
Requests that began before, on instances that take no more, run beside them. So the sequences on
paths over a node may take up to `OVERFULL` times its slots, but no more. A replica never takes more
sequences than its node has slots.
"""

from collections.abc import Collection

from shared.messages.instances import Stage

OVERFULL = 5.0
"""Slots' worth of sequences on paths that a node may come to, in multiples of its slots. A decode
step is bound by reading the weights, so that more rows cost it little, and sequences that began
before should not keep new paths from being used: with 4, the demo's requests wait (`python -m
benchmarks.burst`), and more than 5 changes nothing."""
_ROUNDING = 1e-6


def granted(capacity: float, nodes: Collection[tuple[int, float]], *, group: bool = False) -> int:
    """How many sequences an instance takes at once. `capacity` is in units of a complete node of
    speed 1; `nodes` are the slots and the speed of the node of each stage."""
    passes = 1 if group else len(nodes)
    return max(1, round(capacity * passes * min(slots / speed for slots, speed in nodes)))


def weight(stages: Collection[Stage], stage: Stage, blocks: int) -> float:
    """The share of a slot that a sequence on this path takes of the stage's node."""
    return (stage.stop - stage.start) / (blocks * len(stages))


class Account:
    """The slots of one node for one model, and how much of them is taken."""

    __slots__ = ("alone", "on_paths", "slots")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.alone = 0
        """Sequences on the node's replica."""
        self.on_paths = 0.0
        """Slots taken by sequences on paths over the node."""

    def has_room(self, stages: int, weight: float) -> bool:
        """Whether one more sequence fits on an instance of `stages` stages."""
        if stages == 1:
            return self.alone < self.slots
        return self.on_paths + weight <= OVERFULL * self.slots + _ROUNDING

    def add(self, stages: int, weight: float, sequences: int = 1) -> None:
        """Adds sequences, or takes away sequences that have ended (`sequences` below 0)."""
        if stages == 1:
            self.alone += sequences
        else:
            self.on_paths += weight * sequences
