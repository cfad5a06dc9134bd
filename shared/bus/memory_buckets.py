"""The state of the in-memory bus: buckets whose keys expire, and watches on them."""

import asyncio
from collections.abc import Callable

from shared.bus.base import KvEntry, KvOp

Tell = Callable[[KvEntry | None], None]


class Watch:
    """The changes of a bucket as its reader has been told them. None marks the end of the first
    entries."""

    def __init__(self, carry: Callable[[Tell, KvEntry | None], None]) -> None:
        """`carry` takes a change from the bucket to the reader, where it calls `tell`; it may take
        its time."""
        self.carry = carry
        self.changes: asyncio.Queue[KvEntry | None] = asyncio.Queue()
        self._told: dict[str, int] = {}
        self._listed = False

    def tell(self, entry: KvEntry | None) -> None:
        """Takes in a change. Changes that were told already, or were never heard of, are left
        out."""
        if entry is None:
            if not self._listed:
                self.changes.put_nowait(None)
            self._listed = True
            return
        last = self._told.get(entry.key, 0)
        if entry.op is KvOp.PUT and entry.revision > last:
            self._told[entry.key] = entry.revision
            self.changes.put_nowait(entry)
        elif entry.op is KvOp.DELETE and entry.revision > last > 0:
            del self._told[entry.key]
            self.changes.put_nowait(entry)

    def catch_up(self, bucket: "Bucket") -> None:
        """Tells what changed while nothing could be told."""
        for key in [key for key in self._told if key not in bucket.live]:
            self.changes.put_nowait(KvEntry(key, b"", self._told.pop(key), KvOp.DELETE))
        for entry in [*bucket.live.values(), None]:
            self.tell(entry)


class Bucket:
    """The state of one KV bucket. Live entries are kept in the order of their revisions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.live: dict[str, KvEntry] = {}
        self.watches: dict[Watch, None] = {}
        self._revision = 0
        self._expiries: dict[str, asyncio.TimerHandle] = {}

    def set(self, key: str, value: bytes, ttl: int | None) -> int:
        entry = self._change(key, value, KvOp.PUT)
        self.live[key] = entry
        if ttl is not None:
            loop = asyncio.get_running_loop()
            self._expiries[key] = loop.call_later(ttl, self.drop, key)
        return entry.revision

    def drop(self, key: str) -> None:
        if key in self.live:
            self._change(key, b"", KvOp.DELETE)

    def follow(self, watch: Watch) -> None:
        """Tells the live entries, then None, and from now on every change."""
        self.watches[watch] = None
        for entry in [*self.live.values(), None]:
            watch.carry(watch.tell, entry)

    def _change(self, key: str, value: bytes, op: KvOp) -> KvEntry:
        self.live.pop(key, None)
        if expiry := self._expiries.pop(key, None):
            expiry.cancel()
        self._revision += 1
        entry = KvEntry(key, value, self._revision, op)
        for watch in self.watches:
            watch.carry(watch.tell, entry)
        return entry
