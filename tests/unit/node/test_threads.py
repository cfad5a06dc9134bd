"""What other threads say reaches the control loop, in order, and wakes it no more than it must."""

import asyncio
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Any

from services.node.moving.events import Arrival, PullFailure
from services.node.threads import Control, Threads
from shared.errors import TransportError
from shared.ids import GatewayId, ModelId
from shared.messages.serving import Tokens


class Heard(Control):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def tokens_came(self, gateway: GatewayId, tokens: Tokens) -> None:
        raise NotImplementedError

    def swept(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        raise NotImplementedError

    def block_landed(self, landed: Arrival | PullFailure) -> None:
        raise NotImplementedError

    def kv_copied(self, nbytes: int, seconds: float) -> None:
        raise NotImplementedError

    def bytes_sent(self, began: float, ended: float, nbytes: int) -> None:
        self.heard.append(f"{nbytes} bytes")

    def peer_dialled(self, address: str) -> None:
        self.heard.append(address)

    def peer_connected(self, address: str, way: str) -> None:
        raise NotImplementedError

    def peer_lost(self, address: str, error: TransportError) -> None:
        raise NotImplementedError

    def worth(self, model: ModelId, positions: int, nbytes: int) -> bool:
        raise NotImplementedError

    def token_s(self, model: ModelId) -> float:
        raise NotImplementedError

    def piece(
        self, model: ModelId, block: int, offset: int, nbytes: int
    ) -> Coroutine[Any, Any, memoryview]:
        raise NotImplementedError


async def turn() -> None:
    """The loop makes all calls that it was woken for."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_bytes_that_were_sent_wait_for_the_next_call() -> None:
    control = Heard()
    threads = Threads(control, lambda *_, **__: nullcontext())
    await asyncio.to_thread(threads.on_sent, 1.0, 2.0, 7)
    await turn()
    assert control.heard == []
    await asyncio.to_thread(threads.on_dialled, "tcp://b:1")
    await asyncio.to_thread(threads.on_sent, 2.0, 3.0, 8)
    await turn()
    assert control.heard[:2] == ["7 bytes", "tcp://b:1"]
    threads.catch_up()
    assert control.heard == ["7 bytes", "tcp://b:1", "8 bytes"]
    await asyncio.to_thread(threads.on_dialled, "tcp://c:1")
    await turn()
    assert control.heard[3:] == ["tcp://c:1"]
