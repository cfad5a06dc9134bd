"""Virtual time: an event loop whose clock jumps to the next timer when nobody has work to do.

Nothing here is concurrent and nothing does I/O. Sockets are refused, and work meant for a thread
(`asyncio.to_thread`) runs at once, in the loop. Timers fire in the order of their times, timers of
equal time in the order in which they were set, and only when everything that was ready before has
run. Work that draws its clocks and ids from `shared` does the same thing in every run of a seed.
"""

import asyncio
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, TypeVar, TypeVarTuple

from shared import clock, ids

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_NS = 1_700_000_000 * 10**9
"""Wall clock at virtual time 0, in nanoseconds."""
STALL_TURNS = 1_000_000
"""After this many turns of the loop at one moment, the loop is taken to go round in circles."""
_WATCHED_TURNS = 1_000
"""The number of further turns in which the loop records who keeps it going."""
_NAMED = 8
"""How many tasks an error names."""


class Stalled(RuntimeError):
    """Virtual time cannot go on, or went further than allowed."""


class _Timer(asyncio.TimerHandle):
    __slots__ = ()
    _scheduled: bool
    """Whether it is among the loop's timers."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Relies on its base's internals `_ready`, `_run_once`, `_stopping` and `_check_closed`."""

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _check_closed: Callable[[], None]

    def __init__(self, *, late_s: float = 0.0, limit_s: float = math.inf) -> None:
        """`late_s`: how late timers fire. `limit_s`: Stalled is raised if time would go beyond
        it."""
        super().__init__()
        self._now = 0.0
        self._late_s = late_s
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, _Timer]] = []
        self._set = 0
        self._cancelled = 0
        self._turns = 0
        """Turns since time went on."""
        self._busy: Counter[str] = Counter()

    def time(self) -> float:
        return self._now

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """The base's method without its checks in debug mode."""
        self._check_closed()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer._scheduled = True
        self._set += 1
        heapq.heappush(self._timers, (when, self._set, timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Runs the function at once, in no virtual time."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # whatever it is, it belongs to the caller
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        self._turns += 1
        if self._turns > STALL_TURNS:
            self._watch()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self) -> None:
        """Jumps to the next timer, and makes everything ready that is due then."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            self._drop(heapq.heappop(timers)[2])
        if not timers:
            raise Stalled(f"everything waits for ever, no timer is set: {self._waiting()}")
        when = timers[0][0]
        if when > self._now:
            if when > self._limit_s:
                self._limit_s = math.inf  # the work that it interrupts may clean up
                raise Stalled(f"virtual time would pass its limit, {self._now} s so far")
            self._now = when + self._late_s
            self._turns = 0
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if timer._cancelled:
                self._drop(timer)
            else:
                timer._scheduled = False
                self._ready.append(timer)

    def _drop(self, timer: _Timer) -> None:
        timer._scheduled = False
        self._cancelled -= 1

    def _timer_handle_cancelled(self, timer: _Timer) -> None:
        if not timer._scheduled:
            return
        self._cancelled += 1
        if self._cancelled > 100 and 2 * self._cancelled > len(self._timers):
            for entry in self._timers:
                if entry[2]._cancelled:
                    entry[2]._scheduled = False
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _watch(self) -> None:
        self._busy.update(_name(handle) for handle in self._ready)
        if self._turns > STALL_TURNS + _WATCHED_TURNS:
            busiest = ", ".join(f"{name} ({n})" for name, n in self._busy.most_common(_NAMED))
            self._turns = 0
            self._busy.clear()
            raise Stalled(f"time stands still at {self._now} s; what runs on and on: {busiest}")

    def _waiting(self) -> str:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        more = len(names) - _NAMED
        return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

    def _write_to_self(self) -> None:
        """Would wake a loop that sleeps in the kernel; this loop never does."""

    def _process_events(self, event_list: object) -> None:
        raise NotImplementedError("no I/O in virtual time")


def _name(handle: asyncio.Handle) -> str:
    """The name of the task that the handle is a step of, or else of its function."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        return owner.get_name()
    return getattr(callback, "__qualname__", repr(callback))


class WallClock:
    """The wall clock of one process, which may be wrong."""

    skew_ns = 0


own_clock: ContextVar[WallClock] = ContextVar("own_clock")
"""The wall clock of the process to which the code that runs belongs, if it is not right."""


@contextmanager
def reproducible(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Until the block ends, wall clock, ids and `random` follow from the loop's time and the
    seed."""
    draw = random.Random(seed)
    before = clock.wall_source, ids.id_source, random.getstate()
    right = WallClock()
    clock.wall_source = lambda: EPOCH_NS + round(loop.time() * 1e9) + own_clock.get(right).skew_ns
    ids.id_source = lambda: f"{draw.getrandbits(40):010x}"
    random.seed(seed)
    try:
        yield
    finally:
        clock.wall_source, ids.id_source = before[:2]
        random.setstate(before[2])


def run(
    work: Coroutine[Any, Any, T],
    *,
    seed: int = 0,
    late_s: float = 0.0,
    limit_s: float = math.inf,
) -> T:
    """Runs `work` to its end in virtual time, reproducibly by `seed`."""
    loop = VirtualLoop(late_s=late_s, limit_s=limit_s)
    with reproducible(loop, seed), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(work)
