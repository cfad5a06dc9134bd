"""A bus that fails, and what several tests of a node's service share."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from shared import subjects
from shared.bus.memory import MemoryBroker, MemoryBus, MemoryObjectStore
from shared.errors import BusError, BusTimeout
from shared.messages import Message
from tests.unit.node.cluster import ALL

FROM_A = dict.fromkeys(ALL, "a")


WAIT_S = 100.0


SLOW: dict[str, Any] = {"step_floor_s": 0.02}


class Trouble(MemoryBus):
    """A bus that does not take what is published on some subjects, or asset uploads."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker, name)
        self.refused: set[str] = set()
        self._lost: list[str] = []
        self._changed = asyncio.Event()

    async def until_lost(self, subject: str, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self._lost.count(subject) < count:
                self._changed.clear()
                await self._changed.wait()

    async def publish(self, subject: str, message: Message) -> None:
        if subject in self.refused:
            self._lost.append(subject)
            self._changed.set()
            raise BusError(f"{subject}: the buffer is full")
        await super().publish(subject, message)

    async def objects(self) -> MemoryObjectStore:
        if subjects.OBJECTS in self.refused:
            raise BusTimeout("no answer from the asset store")
        return await super().objects()


def broken(checkpoint: Path, into: Path, config: dict[str, object]) -> Path:
    into.mkdir()
    for path in checkpoint.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    old = msgspec.json.decode((into / "config.json").read_bytes())
    (into / "config.json").write_bytes(msgspec.json.encode(old | config))
    return into
