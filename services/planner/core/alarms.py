"""Alarms: any number of names, each with one time at which it is due."""

import heapq

NEVER = float("inf")


class Alarms:
    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Entries that differ from `_at` are void."""

    def set(self, name: str, at: float) -> None:
        """Sets the time of a name, in place of an earlier one. NEVER: no time."""
        if self._at.get(name, NEVER) == at:
            return
        if at == NEVER:
            del self._at[name]
            return
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def bring_forward(self, name: str, at: float) -> None:
        """Sets the time of a name, unless it has an earlier one."""
        if at < self._at.get(name, NEVER):
            self.set(name, at)

    @property
    def next(self) -> float:
        self._drop_void()
        return self._heap[0][0] if self._heap else NEVER

    def due(self, now: float) -> list[str]:
        """Names whose times have come. They have no time from now on."""
        found: list[str] = []
        self._drop_void()
        while self._heap and self._heap[0][0] <= now:
            name = heapq.heappop(self._heap)[1]
            del self._at[name]
            found.append(name)
            self._drop_void()
        return found

    def _drop_void(self) -> None:
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
