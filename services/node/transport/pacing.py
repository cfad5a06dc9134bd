"""One direction of a node's link: who sends next, and how fast.

The planner's step model gives a node one port in each direction, which serves one transfer at a
time, most urgent first (RDMC 2018, section 4; lambda-Scale, section 4.2). All connections of a
direction share one `Port` and take a grant for every frame, so the order holds across peers. A
grant is as large as what the link moves in GRANT_S, within limits; this is also how long a more
urgent transfer has to wait.

Priorities are steps of one plan and mean nothing beside the steps of another. So transfers of
different flows (models) share the port evenly (start-time fair queueing, Goyal et al. 1996).
Requests wait for the KV that moves, so its flow gets `SERVING_PARTS` parts where the weights of a
model get one: beside one model, loading takes a tenth of the port from it.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.port_shares import SERVING_PARTS

GRANT_S = 0.006
"""Seconds. With frames of 64 KiB, half of the processor's time would go into costs that do not
depend on the frame's size. (A chunk takes 5.5 ms on a link of 400 Mbit/s, so it is one frame.)"""
AHEAD_S = 0.002
"""Seconds. The next frame begins when the link needs this long for what is left of the last one."""
MIN_GRANT = 64 * 1024
MAX_GRANT = 4 << 20
"""The largest grant in bytes. Larger frames would cost less processor time, but only a link of GB/s
would notice."""
SERVING_FLOW = "kv/"
"""The flow of the KV of all requests."""
MEMORY = 0.8
"""Weight of the past, for each grant, in the measured rate of an unpaced port."""
TICK_S = 0.001
"""uvloop's timers round to whole milliseconds: a timer due in less than half of one fires at once,
over and over. Firing half a tick early is harmless: grants are accounted for, so the rate holds."""
LATENESS_S = 0.02
"""Seconds. Timers fire late (by 1 ms and more). A port with work to do makes up for at most this
much."""
QUIET_S = 0.001
"""Seconds. If nobody asked for the port for this long, it had nothing to do, and the unused time is
lost."""
PATIENCE_S = 0.005
"""Seconds. An unpaced grant that takes longer, because its receiver is slow, no longer holds the
others back."""


def parts(flow: str) -> int:
    """How many parts of a port the flow gets."""
    return SERVING_PARTS if flow == SERVING_FLOW else 1


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
    """Gives grants by turn: the lowest priority number first, and among equals whole transfers in
    order of arrival. A lane (a connection) has one grant at a time.

    With `bytes_per_s` > 0 the port is a token bucket as deep as one grant, so an idle port gives a
    grant at once. With 0 it goes as fast as it can, with at most `width` grants at a time over all
    lanes (0: any number). The width is needed because the receivers then limit the rate, and
    transfers that shared the link would all be late. `min_grant`: the smallest grant of an unpaced
    port, for ways on which asking for a grant takes long.
    """

    def __init__(self, bytes_per_s: int, *, width: int = 0, min_grant: int = MIN_GRANT) -> None:
        self._rate = bytes_per_s
        self._width = 0 if bytes_per_s else width
        self._min_grant = MIN_GRANT if bytes_per_s else min_grant
        self._queues: dict[tuple[Hashable, str], list[_Ticket]] = {}
        """Waiting grants, by lane and flow."""
        self._lanes: dict[Hashable, float] = {}
        """Lanes that have a grant, and when they got it."""
        self._served: dict[str, int] = {}
        """What each flow was served since the port was last idle, as if all flows had begun
        together: bytes, divided by the flow's part of the port."""
        self._now_served = 0
        """What the flow of the last grant had been served then. A flow that arrives now begins with
        as much."""
        self._free_at = 0.0
        self._quiet_since: float | None = 0.0
        """When the last holder left and nobody waited; None while the port is in use."""
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        self.unsent: Callable[[], Awaitable[None]] | None = None
        """What the last holder would have waited for, if anybody had wanted the port. The next
        holder waits for it instead."""
        self._moved, self._moving_s = 0.0, 0.0
        """Bytes granted lately, and how long they took."""

    @property
    def grant_bytes(self) -> int:
        """How many bytes to take a grant for."""
        return min(max(self._min_grant, int(self._measured * GRANT_S)), MAX_GRANT)

    @property
    def ahead_bytes(self) -> int:
        """How many bytes of a frame may be unsent when the next frame begins."""
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
        """Whether somebody waits for the port."""
        return bool(self._queues)

    @property
    def unlimited(self) -> bool:
        """Whether nobody ever has to wait, so that no grants are needed."""
        return not self._rate and not self._width

    def grant(self, lane: Hashable, turn: Turn, nbytes: int) -> "Grant":
        """To be entered with `async with`: waits for the port, and holds it until the block
        ends."""
        return Grant(self, lane, turn, nbytes)

    def charge(self, nbytes: int) -> None:
        """Accounts for bytes that bypass the queue (messages), so that later grants wait for
        them."""
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
        # A holder that did not wait for its frame to leave says nothing about the rate.
        if self.unsent is None:
            self._moved = self._moved * MEMORY + nbytes
            self._moving_s = self._moving_s * MEMORY + held_s
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
        """Records that the port is idle, if nobody holds or wants it."""
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
        self._served[flow] += nbytes * SERVING_PARTS // parts(flow)
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
