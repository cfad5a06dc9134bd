"""The control bus with time and faults: latency, loss, cuts, outages, stopped and dead processes.

A fault does to a `MemoryBus` what it would do to a client of NATS
(`shared/bus/nats_connection.py`):

- A connection that is cut is only silent at first: what either side sends arrives late if the cut
  ends in time. After DETECT_S the client knows. What was on its way is lost then, and its bucket
  calls that wait for an answer end at once. What the client publishes is kept, up to BUFFER_BYTES,
  until it has connected again. Its later requests and bucket calls wait for that, or time out. Its
  watches learn what changed meanwhile.
- An outage of the broker is the same for all clients, and noticed at once. Buckets and objects
  survive it.
- A store without a leader answers no bucket call, and does nothing that it was asked to. Messages
  pass.
- A stopped process (SIGSTOP) neither sends nor receives, and goes on as if nothing had happened.
- A dead process is gone at once: nothing that its bus is still asked to send arrives anywhere, so
  that it can be torn down unseen. Its calls end by their timeouts.

Order is kept by connection and subject. Everything random follows from the seed.
"""

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from shared.bus.memory import MemoryBroker, MemoryBus, MemorySubscription, Reply
from shared.clock import now
from shared.errors import BusError, BusTimeout

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DETECT_S = 4.0
"""Seconds. A NATS client pings every second, and gives up when the third ping finds two
unanswered."""
RECONNECT_S = 0.2
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 5.0
BUFFER_BYTES = 2 << 20
"""nats-py's default."""
_TRY_S = 0.1


@dataclass(slots=True)
class _Held:
    """A message that a client sends and that cannot leave yet."""

    at: float
    act: Callable[[], object]
    caller: "asyncio.Future[Any] | None"
    """Who waits for the outcome. None: nobody waits, and the message is kept."""


@dataclass(slots=True, eq=False)
class _Wire:
    """The connection between one bus and the broker."""

    open: bool = True
    """Whether it is neither cut nor stopped."""
    cuts: set[str] = field(default_factory=set)
    """The reasons why nothing passes."""
    connected_at: float = 0.0
    noticed_at: float = 0.0
    """When the client notices, while something cuts the connection."""
    stopped: bool = False
    dead: bool = False
    upward: list[_Held] = field(default_factory=list)
    buffered: int = 0
    """Bytes of `upward` that were published since the client noticed."""
    downward: list[Callable[[], object]] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    """When the last message of each subject arrives, if latencies differ."""
    calls: "dict[asyncio.Future[Any], None]" = field(default_factory=dict)
    process: Context = field(default_factory=copy_context)
    """What belongs to the client's process, such as its clock."""

    @property
    def noticed(self) -> bool:
        return bool(self.cuts) and now() >= self.noticed_at


class SimBroker(MemoryBroker):
    def __init__(
        self,
        *,
        latency_s: float = 100e-6,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`latency_s`: of a message from client to client, and of a call with its answer. Each
        receiver has up to `jitter_s` more. `loss`: the probability that a receiver does not get a
        message or an answer. Bucket calls and watches lose nothing."""
        super().__init__()
        self.loss = loss
        self.leaderless = False
        self.storeless: set[str] = set()
        """The names of processes that the durable store does not answer; messages reach them."""
        self._latency_s = latency_s
        self.jitter_s = jitter_s
        self._draw = random.Random(seed).random
        self._wires: dict[MemoryBus, _Wire] = {}
        self._cut: set[str] = set()
        self._down = False

    # --- faults ---

    def cut(self, name: str) -> None:
        """Separates the buses of this name, also those opened later, from the broker."""
        self._cut.add(name)
        for bus, wire in self._named(name):
            _break(wire, "cut", now() + DETECT_S)
            asyncio.get_running_loop().call_later(DETECT_S, _end_calls, bus.name, wire)

    def heal(self, name: str) -> None:
        self._cut.discard(name)
        for bus, _ in self._named(name):
            self._mend(bus, "cut")

    def fail(self) -> None:
        """Begins an outage of the broker."""
        self._down = True
        for bus, wire in self._wires.items():
            _break(wire, "outage", now())
            _end_calls(bus.name, wire)

    def recover(self) -> None:
        self._down = False
        for bus in list(self._wires):
            self._mend(bus, "outage")

    def stop(self, name: str) -> None:
        for _, wire in self._named(name):
            wire.stopped, wire.open = True, False

    def resume(self, name: str) -> None:
        for _, wire in self._named(name):
            wire.stopped = False
            self._release(wire)

    def crash(self, name: str) -> None:
        """Ends a process. Whoever opens a bus under this name later is another process."""
        for bus, wire in self._named(name):
            wire.dead, wire.open = True, False
            wire.upward.clear()
            wire.downward.clear()
            for subscription in bus.subscriptions:
                self.leave(subscription)
            for watch, bucket in bus.watches.items():
                bucket.watches.pop(watch, None)

    @property
    def refused(self) -> int:
        """Messages that their receivers refused, because they know a later term of that role."""
        return sum(bus.stale for bus in self._wires)

    def reaches(self, name: str) -> bool:
        """Whether what a process says passes now, and what others say comes to it."""
        return all(wire.open for _, wire in self._named(name))

    # --- wires ---

    async def connect(self, bus: MemoryBus) -> None:
        deadline = now() + CONNECT_TIMEOUT_S
        while self._down or bus.name in self._cut:
            if now() >= deadline:
                raise BusError(f"{bus.name}: no NATS server within {CONNECT_TIMEOUT_S} s")
            await asyncio.sleep(_TRY_S)
        self._wires[bus] = _Wire()

    def connected_at(self, bus: MemoryBus) -> float | None:
        wire = self._wires.get(bus)
        return None if wire is None or wire.noticed else wire.connected_at

    def disconnect(self, bus: MemoryBus) -> None:
        wire = self._wires.pop(bus, None)
        for call in wire.calls if wire else ():
            if not call.done():
                call.set_exception(BusError(f"{bus.name}: the bus was closed"))

    def send(self, bus: MemoryBus, subject: str, data: bytes, reply: Reply | None) -> None:
        act = partial(self.deliver, subject, data, reply)
        self._up(bus, act, reply.answer if reply else None, len(data))

    def answer(self, bus: MemoryBus, reply: Reply, data: bytes) -> None:
        if not self._lost():
            with suppress(BusError):  # the buffer is full; NATS' client would log it
                self._up(bus, partial(super().answer, bus, reply, data), None, len(data))

    def hand(self, subscription: MemorySubscription, data: bytes, reply: Reply | None) -> None:
        if subscription.bus is None or not self._lost():
            super().hand(subscription, data, reply)

    def down(self, bus: MemoryBus, subject: str, act: Callable[[*Ts], object], *args: *Ts) -> None:
        wire = self._wires.get(bus)
        if wire is None or wire.dead or wire.noticed:
            return
        received = partial(wire.process.copy().run, partial(act, *args))
        if not wire.open:
            wire.downward.append(received)
        elif not self.jitter_s and wire.last.get(subject, 0.0) <= now():
            received()
        else:
            earliest = math.nextafter(wire.last.get(subject, 0.0), math.inf)
            at = wire.last[subject] = max(now() + self._draw() * self.jitter_s, earliest)
            asyncio.get_running_loop().call_at(at, received)

    async def exchange(self, bus: MemoryBus, what: str, act: Callable[[], T], *, stored: bool) -> T:
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def at_server() -> None:
            if stored and (self.leaderless or bus.name in self.storeless):
                return
            try:
                self.down(bus, "", _give, done, act())
            except Exception as error:  # whatever it is, it belongs to the caller
                self.down(bus, "", _fail, done, error)

        wire = self._wires[bus]
        wire.calls[done] = None
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                self._up(bus, at_server, done, 0)
                return await done
        except TimeoutError as error:
            raise BusTimeout(f"{what}: no answer within {CALL_TIMEOUT_S} s") from error
        finally:
            done.cancel()
            del wire.calls[done]

    def _up(
        self,
        bus: MemoryBus,
        act: Callable[[], object],
        caller: "asyncio.Future[Any] | None",
        nbytes: int,
    ) -> None:
        wire = self._wires.get(bus)
        if wire is None or wire.dead:
            return
        if wire.open:
            asyncio.get_running_loop().call_later(self._latency_s, act)
            return
        if caller is None and wire.noticed:
            if wire.buffered + nbytes > BUFFER_BYTES:
                raise BusError(f"{bus.name}: not connected, and the buffer for messages is full")
            wire.buffered += nbytes
        wire.upward.append(_Held(now(), act, caller))

    def _lost(self) -> bool:
        return self.loss > 0 and self._draw() < self.loss

    # --- after a fault ---

    def _named(self, name: str) -> list[tuple[MemoryBus, _Wire]]:
        return [(bus, wire) for bus, wire in self._wires.items() if bus.name == name]

    def _mend(self, bus: MemoryBus, cut: str) -> None:
        wire = self._wires[bus]
        if cut not in wire.cuts:
            return
        noticed = wire.noticed
        wire.cuts.discard(cut)
        if wire.cuts:
            return
        if not noticed:
            self._release(wire)
            return
        wire.cuts.add("connecting")
        wire.downward.clear()
        wire.upward = [held for held in wire.upward if held.at >= wire.noticed_at]
        asyncio.get_running_loop().call_later(RECONNECT_S, self._connected, bus)

    def _connected(self, bus: MemoryBus) -> None:
        wire = self._wires.get(bus)
        if wire is None:
            return
        wire.cuts.discard("connecting")
        if wire.cuts:
            return
        wire.buffered, wire.connected_at = 0, now()
        wire.upward = [h for h in wire.upward if h.caller is None or not h.caller.done()]
        for watch, bucket in bus.watches.items():
            if watch in bucket.watches:
                self.down(bus, bucket.name, watch.catch_up, bucket)
        self._release(wire)

    def _release(self, wire: _Wire) -> None:
        """Lets through what was held, if nothing holds it any more."""
        if wire.cuts or wire.stopped or wire.dead:
            return
        wire.open = True
        upward, wire.upward = wire.upward, []
        downward, wire.downward = wire.downward, []
        for held in upward:
            asyncio.get_running_loop().call_later(self._latency_s, held.act)
        for act in downward:
            act()


def _break(wire: _Wire, cut: str, noticed_at: float) -> None:
    wire.noticed_at = min(wire.noticed_at, noticed_at) if wire.cuts else noticed_at
    wire.cuts.add(cut)
    wire.open = False


def _end_calls(name: str, wire: _Wire) -> None:
    """The client notices that what it asked will not be answered, unless the cut has ended."""
    if wire.noticed:
        for call in wire.calls:
            _fail(call, BusTimeout(f"{name}: the connection was lost before an answer came"))


def _give(done: "asyncio.Future[T]", value: T) -> None:
    if not done.done():
        done.set_result(value)


def _fail(done: "asyncio.Future[T]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
