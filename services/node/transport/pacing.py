"""One direction of a node's link: who sends next, and how fast.

The planner's step model gives a node one port each way that serves one transfer at a time, most
urgent first (RDMC 2018, section 4; lambda-Scale, section 4.2). All connections of a direction
share one `Port` and take a grant for every frame, so the order holds across peers. A grant is for
what the link moves in GRANT_S, within limits: that is how long a more urgent transfer waits.

Priorities are steps of one plan and mean nothing beside those of another: transfers of different
flows (models) share the port evenly (start-time fair queueing, Goyal et al. 1996).
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

GRANT_S = 0.006
"""What a frame costs the processor, whatever its size, is half of all at 64 KiB. (A chunk takes
5.5 ms on a link of 400 Mbit/s: it goes as one.)"""
AHEAD_S = 0.002
"""Of a frame, this much may still wait in the kernel when the next one is begun."""
MIN_GRANT = 64 * 1024
MAX_GRANT = 4 << 20
"""Larger frames cost less processor time, which only a link of GB/s can feel."""
_MEMORY = 0.8
"""Weight of the past in the measured rate of an unpaced port, per grant."""
TICK_S = 0.001
"""uvloop's timers count whole ms, rounded: one due in less than half of one fires at once, over and
over. So much too soon is soon enough; the rate stays, since what was granted counts."""
LATENESS_S = 0.02
"""Timers fire late (1 ms and more): a port with work to do makes up for at most this much."""
QUIET_S = 0.001
"""A port that nobody asked for this long had nothing to do: unused time is lost."""
PATIENCE_S = 0.005
"""An unpaced grant that takes longer (its receiver is slow) no longer holds the others back."""


class Turn(NamedTuple):
    """The place of a transfer in its port's queue, for all of its frames."""

    priority: int
    arrival: int
    flow: str


@dataclass(order=True, slots=True)
class _Ticket:
    turn: Turn
    nbytes: int = field(compare=False)
    granted: asyncio.Future[None] = field(compare=False)


class Port:
    """Grants by turn: lowest priority number first, whole transfers in order of arrival inside.
    A lane (a connection) has one grant at a time.

    `bytes_per_s` > 0: a token bucket as deep as one grant (an idle port gives one at once).
    0: as fast as it goes, and at most `width` grants at a time over all lanes (0: any number),
    since then the receivers tell the link's rate and transfers that share it would all be late.
    `min_grant`: of an unpaced port, where asking for a grant takes long.
    """

    def __init__(self, bytes_per_s: int, *, width: int = 0, min_grant: int = MIN_GRANT) -> None:
        self._rate = bytes_per_s
        self._width = 0 if bytes_per_s else width
        self._min_grant = MIN_GRANT if bytes_per_s else min_grant
        self._queues: dict[tuple[Hashable, str], list[_Ticket]] = {}
        """By lane and flow."""
        self._lanes: dict[Hashable, float] = {}
        """Lanes with a grant, and when they got it."""
        self._served: dict[str, int] = {}
        """Bytes by flow, as if all flows had begun together; since the port was last idle."""
        self._now_served = 0
        """What the flow of the last grant had then: where a flow begins that comes now."""
        self._free_at = 0.0
        self._quiet_since: float | None = 0.0
        """When the last holder left and nobody waited."""
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        self.unsent: Callable[[], Awaitable[None]] | None = None
        """What the last holder left for the next one to wait for: nobody wanted the port."""
        self._moved, self._moving_s = 0.0, 0.0
        """Bytes granted lately and how long they took."""

    @property
    def grant_bytes(self) -> int:
        """How many bytes to take a grant for."""
        return min(max(self._min_grant, int(self._measured * GRANT_S)), MAX_GRANT)

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of a frame may be unsent when the next one is begun."""
        return min(max(self._min_grant, int(self._measured * AHEAD_S)), MAX_GRANT)

    @property
    def _measured(self) -> float:
        return self._rate or (self._moved / self._moving_s if self._moving_s else 0.0)

    def arrive(self, priority: int, flow: str = "") -> Turn:
        """The turn of a transfer that begins now."""
        self._seq += 1
        return Turn(priority, self._seq, flow)

    @property
    def wanted(self) -> bool:
        """Somebody waits for it."""
        return bool(self._queues)

    @property
    def unlimited(self) -> bool:
        """Nobody has to wait for it: there is no need to take grants."""
        return not self._rate and not self._width

    def grant(self, lane: Hashable, turn: Turn, nbytes: int) -> "Grant":
        """`async with` it: waits for the port, which is held until the block ends."""
        return Grant(self, lane, turn, nbytes)

    def charge(self, nbytes: int) -> None:
        """Accounts for bytes that go past the queue (messages): later grants wait for them."""
        if self._rate:
            self._give_up_quiet_time(asyncio.get_running_loop().time())
            self._free_at += nbytes / self._rate

    async def _acquire(self, lane: Hashable, turn: Turn, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._give_up_quiet_time(now)
        self._quiet_since = None
        if all(flow != turn.flow for _, flow in self._queues):
            self._served[turn.flow] = max(self._served.get(turn.flow, 0), self._now_served)
        if not self._queues and not self._lanes and self._timer is None:
            self._free_at = max(self._free_at, now - LATENESS_S)
            if self._ready_at(now) <= now + TICK_S / 2:
                self._hold(lane, turn.flow, nbytes, now)
                return
        ticket = _Ticket(turn, nbytes, loop.create_future())
        heapq.heappush(self._queues.setdefault((lane, turn.flow), []), ticket)
        self._dispatch()
        if ticket.granted.done():
            return
        try:
            await ticket.granted
        except asyncio.CancelledError:
            if not ticket.granted.cancelled():
                del self._lanes[lane]
            self._dispatch()
            raise

    def _release(self, lane: Hashable, nbytes: int) -> None:
        loop = asyncio.get_running_loop()
        held_s = loop.time() - self._lanes.pop(lane)
        if self.unsent is None:
            self._moved = self._moved * _MEMORY + nbytes
            self._moving_s = self._moving_s * _MEMORY + held_s
        if self._queues:
            # Later in this turn of the loop, so that the holder's next frame competes too.
            loop.call_soon(self._dispatch)
        else:
            self._rest(loop.time())

    def _dispatch(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._timer is not None:
            if self._rate:
                return
            self._timer.cancel()
            self._timer = None
        self._free_at = max(self._free_at, now - LATENESS_S)
        while (chosen := self._next()) is not None:
            ready_at = self._ready_at(now)
            if ready_at > now + TICK_S / 2:
                self._timer = loop.call_at(ready_at, self._timer_fired)
                return
            self._grant(*chosen, now)
        self._rest(now)

    def _rest(self, now: float) -> None:
        """If nobody has it or wants it."""
        if not self._queues and not self._lanes and self._quiet_since is None:
            self._quiet_since = now
            self._served.clear()
            self._now_served = 0

    def _give_up_quiet_time(self, now: float) -> None:
        if self._quiet_since is not None and now - self._quiet_since > QUIET_S:
            self._free_at = max(self._free_at, now)

    def _timer_fired(self) -> None:
        self._timer = None
        self._dispatch()

    def _ready_at(self, now: float) -> float:
        """When the next grant may be given."""
        if self._rate:
            return self._free_at
        if self._width and len(self._lanes) >= self._width:
            return max(self._lanes.values()) + PATIENCE_S
        return now

    def _next(self) -> tuple[Hashable, str] | None:
        """The queue whose first ticket is next."""
        best: tuple[Hashable, str] | None = None
        least: tuple[int, Turn] | None = None
        for key, queue in list(self._queues.items()):
            lane, flow = key
            while queue and queue[0].granted.cancelled():
                heapq.heappop(queue)
            if not queue:
                del self._queues[key]
            elif lane not in self._lanes:
                rank = self._served[flow], queue[0].turn
                if least is None or rank < least:
                    best, least = key, rank
        return best

    def _grant(self, lane: Hashable, flow: str, now: float) -> None:
        ticket = heapq.heappop(self._queues[lane, flow])
        if not self._queues[lane, flow]:
            del self._queues[lane, flow]
        self._hold(lane, flow, ticket.nbytes, now)
        ticket.granted.set_result(None)

    def _hold(self, lane: Hashable, flow: str, nbytes: int, now: float) -> None:
        self._lanes[lane] = now
        self._now_served = self._served[flow]
        self._served[flow] += nbytes
        if self._rate:
            self._free_at += nbytes / self._rate


class Grant:
    """One turn at a port."""

    __slots__ = ("_lane", "_nbytes", "_port", "_turn")

    def __init__(self, port: Port, lane: Hashable, turn: Turn, nbytes: int) -> None:
        self._port = port
        self._lane = lane
        self._turn = turn
        self._nbytes = nbytes

    async def __aenter__(self) -> None:
        await self._port._acquire(self._lane, self._turn, self._nbytes)

    async def __aexit__(self, *_: object) -> None:
        self._port._release(self._lane, self._nbytes)
