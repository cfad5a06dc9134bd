"""Virtual time: jumps, order, threads that are none, and errors instead of hanging."""

import asyncio
import random
import threading
from itertools import count

import pytest

from shared.clock import now, wall_ns
from shared.ids import new_id
from simulation import loop as loop_module
from simulation.loop import EPOCH_NS, Stalled, run


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        async with asyncio.timeout(1):
            await asyncio.sleep(0.25)
        return now()

    assert run(main()) == pytest.approx(3600.25)


def test_timers_fire_in_order_and_equal_ones_as_they_were_set() -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for index, delay in enumerate((2.0, 1.0, 2.0, 1.0, 2.0)):
            loop.call_later(delay, fired.append, index)
        await asyncio.sleep(3)
        return fired

    assert run(main()) == [1, 3, 0, 2, 4]


def test_a_timer_of_this_moment_waits_until_all_that_is_ready_has_run() -> None:
    """What is left to the end of a moment is done once for all that happens in it."""

    async def main() -> list[str]:
        log: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time(), log.append, "the end")
        for _ in range(5):
            await asyncio.sleep(0)
            log.append("step")
        await asyncio.sleep(1)
        return log

    assert run(main()) == ["step"] * 5 + ["the end"]


def test_cancelled_timers_neither_fire_nor_take_time() -> None:
    async def main() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        timers = [loop.call_later(100 + i, fired.append, i) for i in range(1000)]
        for index, timer in enumerate(timers):
            if index % 10:
                timer.cancel()
        await asyncio.sleep(550)
        return now(), len(fired)

    assert run(main()) == (550, 46)


def test_what_is_meant_for_a_thread_runs_in_the_loop() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        assert now() == 0

    run(main())


def test_waiting_for_ever_names_who_waits() -> None:
    async def main() -> None:
        waiting = asyncio.create_task(asyncio.Event().wait(), name="the-waiter")
        await waiting

    with pytest.raises(Stalled, match="the-waiter"):
        run(main())


def test_going_round_in_circles_names_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "STALL_TURNS", 100)

    async def spin() -> None:
        for _ in count():
            await asyncio.sleep(0)

    async def main() -> None:
        spinning = asyncio.create_task(spin(), name="the-spinner")
        await asyncio.sleep(1)
        spinning.cancel()

    with pytest.raises(Stalled, match="the-spinner"):
        run(main())


def test_time_has_a_limit_and_what_it_interrupts_cleans_up() -> None:
    cleaned: list[float] = []

    async def main() -> None:
        try:
            for _ in count():
                await asyncio.sleep(3)
        finally:
            await asyncio.sleep(20)
            cleaned.append(now())

    with pytest.raises(Stalled, match="limit"):
        run(main(), limit_s=10)
    assert cleaned == [29]


def test_sockets_are_refused() -> None:
    async def main() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(NotImplementedError):
        run(main())


def test_clocks_ids_and_chance_follow_from_the_seed() -> None:
    async def main() -> list[object]:
        await asyncio.sleep(1.5)
        return [wall_ns(), new_id("ev"), new_id("ev"), random.random()]

    state = random.getstate()
    first = run(main(), seed=1)
    assert first[0] == EPOCH_NS + 1_500_000_000
    assert first[1] != first[2]
    assert run(main(), seed=1) == first
    assert run(main(), seed=2)[1:] != first[1:]
    assert random.getstate() == state
    assert abs(wall_ns() - EPOCH_NS) > 10**15
    assert new_id("ev") not in first


def test_late_timers() -> None:
    async def main() -> float:
        await asyncio.sleep(1)
        return now()

    assert run(main(), late_s=0.01) == pytest.approx(1.01)
