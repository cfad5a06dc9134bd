"""A set of byte ranges of a memory."""

import threading
from bisect import bisect_left, bisect_right


class Ranges:
    """Ranges of bytes, [start, stop). Threads may share it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        """Ascending. The ranges do not touch each other."""
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> None:
        with self._lock:
            low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if low < high:
                start = min(start, self._starts[low])
                stop = max(stop, self._stops[high - 1])
            self._starts[low:high], self._stops[low:high] = [start], [stop]

    def discard(self, start: int, stop: int) -> None:
        with self._lock:
            low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
            if low >= high:
                return
            first, last = self._starts[low], self._stops[high - 1]
            left = [(first, start)] * (first < start) + [(stop, last)] * (stop < last)
            self._starts[low:high] = [begin for begin, _ in left]
            self._stops[low:high] = [end for _, end in left]

    def cover(self, start: int, stop: int) -> bool:
        with self._lock:
            index = bisect_right(self._starts, start) - 1
            return index >= 0 and stop <= self._stops[index]
