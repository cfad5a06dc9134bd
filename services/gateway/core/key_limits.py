"""How many idempotency keys a client may have at a gateway at once."""

from collections import Counter, deque

from shared.errors import CapacityExceeded


class KeyLimits:
    """Keys count until their answers are no longer kept."""

    def __init__(self, limit: int, keep_s: float) -> None:
        self._limit = limit
        self._keep_s = keep_s
        self._until: deque[tuple[float, str, str]] = deque()
        """(time, client, key), in order of time."""
        self._known: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()

    def take(self, client: str, key: str, now: float) -> None:
        """CapacityExceeded if the key is new, and the client has too many."""
        while self._until and self._until[0][0] <= now:
            _, gone, name = self._until.popleft()
            self._known.remove((gone, name))
            self._counts[gone] -= 1
            if not self._counts[gone]:
                del self._counts[gone]
        if (client, key) in self._known:
            return
        if self._counts[client] >= self._limit:
            wait_s = next(until for until, owner, _ in self._until if owner == client) - now
            raise CapacityExceeded(
                f"{self._limit} idempotency keys of this client are kept already "
                "(gateway.max_keys): try again later, or without a key",
                retry_after_s=wait_s,
            )
        self._until.append((now + self._keep_s, client, key))
        self._known.add((client, key))
        self._counts[client] += 1
