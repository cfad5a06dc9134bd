"""When a node says which blocks it has: at once, or, in events of many nodes, several together."""

from collections.abc import Collection
from math import inf

from shared.messages.scaling import BlockArrived


class Gathering:
    """The blocks of one plan that have come and are not reported yet."""

    def __init__(self, report_s: float, wanted: Collection[int]) -> None:
        """`report_s`: the least seconds between two reports; `wanted`: the blocks that are to come.
        When the last of them is there, that is said at once."""
        self._report_s = report_s
        self._wanted = set(wanted)
        self._waiting: list[BlockArrived] = []
        self._due = -inf

    @property
    def done(self) -> bool:
        """Whether all has come and is reported."""
        return not (self._wanted or self._waiting)

    @property
    def due(self) -> float:
        """When what waits is to be reported. inf: nothing waits."""
        return self._due if self._waiting else inf

    def add(self, arrived: BlockArrived) -> None:
        self._waiting.append(arrived)
        self._wanted.discard(arrived.block)
        if not self._wanted:
            self._due = -inf

    def take(self, now: float, *, early: bool = False) -> tuple[BlockArrived, ...]:
        """What is to be reported now, if anything is. `early`: all that waits, due or not."""
        if not self._waiting or (now < self._due and not early):
            return ()
        found, self._waiting = tuple(self._waiting), []
        self._due = now + self._report_s
        return found
