"""Reports from a node's other threads, brought to its control loop.

The engine and the data plane call these methods on their own threads. Messages between these two go
straight across. Everything else is called on the control loop, in order.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from services.node.core.kv import KvMover
from services.node.moving.events import Arrival, PlaneListener, PullFailure
from services.node.moving.mover import block_of
from services.node.parts import AnyDataPlane, AnyWorker, WorkerListener
from services.node.transport.base import Brought, Buffer
from shared.errors import LambdaScaleError, PeerLost, RegionUnknown, TransportError
from shared.ids import GatewayId, ModelId
from shared.messages.serving import Tokens


class Control(Protocol):
    """What a node does on its control loop. An error is logged, and ends only the call."""

    def tokens_came(self, gateway: GatewayId, tokens: Tokens) -> None: ...
    def worth(self, model: ModelId, positions: int, nbytes: int) -> bool:
        """Called on the engine's thread."""

    def token_s(self, model: ModelId) -> float:
        """Called on the engine's thread."""

    def swept(self, model: ModelId, share: float, tokens: float, seconds: float) -> None: ...
    def block_landed(self, landed: Arrival | PullFailure) -> None: ...
    def bytes_sent(self, began: float, ended: float, nbytes: int) -> None: ...
    def kv_copied(self, nbytes: int, seconds: float) -> None: ...
    def peer_dialled(self, address: str) -> None: ...
    def peer_connected(self, address: str, way: str) -> None: ...
    def peer_lost(self, address: str, error: TransportError) -> None: ...
    def piece(
        self, model: ModelId, block: int, offset: int, nbytes: int
    ) -> Coroutine[Any, Any, memoryview]: ...


class Threads(WorkerListener, PlaneListener):
    """Made on the control loop; `worker` and `data` are set before they are started."""

    worker: AnyWorker
    data: AnyDataPlane

    def __init__(
        self, control: Control, contain: Callable[..., AbstractContextManager[None]]
    ) -> None:
        """`contain`: see `Service.contain`."""
        self._control = control
        self._contain = contain
        self._loop = asyncio.get_running_loop()
        self._calls: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._woken = False
        """Whether the loop was woken for them."""
        self._calling = threading.Lock()

    # --- on the engine thread -------------------------------------------------

    def send(self, address: str, header: bytes, payload: Sequence[Buffer]) -> None:
        self.data.send(address, header, payload)

    def emit(self, gateway: GatewayId, tokens: Tokens) -> None:
        self._call(self._control.tokens_came, gateway, tokens)

    @property
    def kv(self) -> KvMover | None:
        return self.data.kv

    def worth(self, model: ModelId, positions: int, nbytes: int) -> bool:
        return self._control.worth(model, positions, nbytes)

    def token_s(self, model: ModelId) -> float:
        return self._control.token_s(model)

    def ran(self, model: ModelId, share: float, tokens: float, seconds: float) -> None:
        self._call(self._control.swept, model, share, tokens, seconds)

    # --- on the data plane's loop ---------------------------------------------

    def on_message(self, sender: str, header: memoryview, payload: memoryview) -> None:
        self.worker.on_message(sender, header, payload)

    def on_peer_lost(self, address: str, error: TransportError) -> None:
        if address != self.data.address:  # while this node runs, it is not lost to itself
            self.worker.on_peer_lost(address, error)
            self._call(self._control.peer_lost, address, error)

    def on_dialled(self, address: str) -> None:
        self._call(self._control.peer_dialled, address)

    def on_connected(self, address: str, way: str) -> None:
        self._call(self._control.peer_connected, address, way)

    def on_sent(self, began: float, ended: float, nbytes: int) -> None:
        self._call(self._control.bytes_sent, began, ended, nbytes, wakes=False)

    async def bring(self, region: str, offset: int, nbytes: int) -> Brought:
        """What a peer reads that is not in the arena comes from the disk."""
        try:
            model, block = block_of(region)
            return Brought(model, await self._piece(model, block, offset, nbytes))
        except LambdaScaleError as error:
            raise RegionUnknown(f"no region {region} here, and {error}") from error

    async def _piece(self, model: ModelId, block: int, offset: int, nbytes: int) -> memoryview:
        work = self._control.piece(model, block, offset, nbytes)
        try:
            begun = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise PeerLost("this node ends") from error
        return await asyncio.wrap_future(begun)

    def on_arrived(self, arrival: Arrival) -> None:
        self._call(self._control.block_landed, arrival)

    def on_failed(self, failure: PullFailure) -> None:
        self._call(self._control.block_landed, failure)

    def on_kv_copied(self, nbytes: int, seconds: float) -> None:
        self._call(self._control.kv_copied, nbytes, seconds, wakes=False)

    # --- to the control loop --------------------------------------------------

    def catch_up(self) -> None:
        """Makes the calls that have come, on the control loop."""
        with self._calling:
            calls, self._calls, self._woken = self._calls, [], False
        for function, args in calls:
            with self._contain("a call of another thread", call=function.__name__):
                function(*args)

    def _call(self, function: Callable[..., None], *args: object, wakes: bool = True) -> None:
        """The loop is woken once for all calls that come before it looks. One that does not wake it
        is made with the next that does, or with the next `catch_up`."""
        with self._calling:
            self._calls.append((function, args))
            wakes = wakes and not self._woken
            self._woken |= wakes
        if wakes:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self.catch_up)
