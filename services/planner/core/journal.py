"""The last decisions about one model."""

from collections import deque

import msgspec

from shared.messages.decisions import Decided

KEPT = 100


class Journal:
    def __init__(self) -> None:
        self._decided: deque[Decided] = deque(maxlen=KEPT)

    def note(self, decided: Decided) -> None:
        """Keeps a decision. Said again, it is not kept again: a model that waits asks every
        second."""
        last = self._decided[-1] if self._decided else None
        if last is None or msgspec.structs.replace(decided, at_ns=last.at_ns) != last:
            self._decided.append(decided)

    def newest(self, limit: int) -> tuple[Decided, ...]:
        return tuple(reversed(self._decided))[: max(0, limit)]

    def since(self, at_ns: int) -> tuple[Decided, ...]:
        """Newest first."""
        return tuple(decided for decided in reversed(self._decided) if decided.at_ns >= at_ns)
