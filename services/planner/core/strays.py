"""Arena space that nobody uses: partial copies that an event left behind, and models that are gone.

Everything in an arena belongs to a member, to a node that is being released, or to a running event.
What belongs to none of them is a stray. Nodes finish a plan without their planner, so a copy that
still grows is left alone. A copy that has stood still for long enough is given back.
"""

from collections.abc import Mapping

from shared.ids import ModelId, NodeId

Copy = tuple[NodeId, ModelId]


class Strays:
    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[Copy, tuple[frozenset[int], float]] = {}
        """What each stray held when it last changed, and when that was."""

    def look(self, strays: Mapping[Copy, frozenset[int]], now: float) -> list[Copy]:
        """The strays to give back. `strays`: all current strays, with their blocks."""
        due: list[Copy] = []
        seen: dict[Copy, tuple[frozenset[int], float]] = {}
        for copy, held in strays.items():
            before = self._seen.get(copy)
            since = before[1] if before is not None and before[0] == held else now
            if now - since < self._patience_s:
                seen[copy] = (held, since)
            else:
                due.append(copy)
        self._seen = seen
        return due
