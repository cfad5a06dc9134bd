"""Live scaling: the first stage of a path runs prompts on while the next stage is busy.

A node that is loading leads paths over the blocks that it has, and a complete node runs the rest.
Where such a path is cut is decided prompt by prompt, by the greedy rule (docs/planning.md;
BlitzScale, OSDI 2025, section 5.2): the first stage runs the next block that it holds of the
earliest prompt, and when the next stage has nothing of it to do, it takes the earliest prompt. So
blocks are of use from the moment at which they arrive, also for prompts that began before.

The cut that the planner chose is the least: the first stage runs its part, and further blocks only
if it holds them and the next stage is busy. The last block of the next stage is left to it, unless
the first stage holds the whole model by then: it runs the prompt to its end, and goes on alone. A
prompt's cut is where it stays, because the KV stays where it was made. A prompt that is longer than
a step is cut with its first micro-batch.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from services.node.core.microbatches import Part
from services.node.core.rows import SequenceKey
from shared.ids import ModelId

Held = Callable[[ModelId], Collection[int]]
"""The blocks that this node can run now."""


@dataclass(slots=True)
class Waiting:
    """A micro-batch that has come through the first stage, as far as that has run it."""

    part: Part
    """Its last part here. It is cut where it has come to."""
    since: int
    """Its place in the line, in the scheduler's ticks."""
    may_end: bool
    """Whether it may run to the end of the model here."""
    aboard: bool = False
    """Whether it runs on at this moment."""

    def block(self, held: Collection[int]) -> int | None:
        """The block that can run next, if this node holds `held`."""
        block, last = self.part.stop, self.part.path.stages[1].stop - 1
        whole = len(self.part.path.stages) == 2 and len(held) > last
        ends = block < last or (self.may_end and whole)
        return block if ends and not self.aboard and block in held else None


class Line:
    """The first micro-batches of prompts, between the first stage and the next."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._waiting: dict[int, Waiting] = {}
        """By their numbers, in order."""
        self._pulled: dict[str, int] = {}
        """How many positions next stages take, by their addresses."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, part: Part, since: int, *, may_end: bool) -> None:
        """The part is through. A part of the same micro-batch may have come before it."""
        self._waiting[part.batch] = Waiting(part, since, may_end)

    def pieces(self) -> Iterator[tuple[int, Part]]:
        """What can run on here, with its place in the line."""
        for waiting in self._waiting.values():
            part = waiting.part
            block = waiting.block(self._held(part.model_id))
            if block is not None:
                path = part.path.cut_at(block + 1)
                yield waiting.since, replace(part, path=path, resumes_at=block)

    def take(self, parts: Collection[Part]) -> None:
        """These parts run on."""
        for part in parts:
            if part.resumes_at:
                self._waiting[part.batch].aboard = True

    def pull(self, by: str, positions: int) -> None:
        """A next stage takes so many positions."""
        self._pulled[by] = positions

    def next(self) -> Part | None:
        """Takes out the earliest micro-batch that its next stage takes."""
        for number, waiting in self._waiting.items():
            part, to = waiting.part, waiting.part.path.followers[0]
            if waiting.aboard or to not in self._pulled:
                continue
            self._pulled[to] -= part.positions
            if self._pulled[to] <= 0:
                del self._pulled[to]
            del self._waiting[number]
            return part
        return None

    def drop(self, keys: Collection[SequenceKey]) -> None:
        """These sequences are over."""
        for number, waiting in tuple(self._waiting.items()):
            if not waiting.part.without(keys).rows:
                del self._waiting[number]
            else:
                waiting.part = waiting.part.without(keys)
