"""Ports, on a clock that only moves when everybody waits for it."""

import asyncio
from collections.abc import Hashable
from contextlib import suppress

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from services.node.transport.pacing import (
    LATENESS_S,
    MAX_GRANT,
    MIN_GRANT,
    PATIENCE_S,
    QUIET_S,
    SERVING_FLOW,
    Port,
)
from shared.clock import now
from shared.port_shares import SERVING_PARTS
from simulation.loop import run

RATE = 100_000_000
Log = list[tuple[float, str, int]]
"""(when, whose, bytes) of each grant."""


async def transfer(
    port: Port,
    name: str,
    nbytes: int,
    priority: int,
    log: Log,
    *,
    lane: Hashable = None,
    flow: str = "",
) -> None:
    turn = port.arrive(priority, flow)
    while nbytes:
        part = min(nbytes, MIN_GRANT)
        async with port.grant(lane or name, turn, part):
            log.append((now(), name, part))
        nbytes -= part


@pytest.mark.parametrize("rate", [10_000_000, RATE])
@pytest.mark.parametrize("late_s", [0.0, 0.0013])
def test_the_rate_is_exact_though_timers_are_late(rate: int, late_s: float) -> None:
    async def main() -> float:
        port, log = Port(rate), Log()
        await asyncio.gather(*(transfer(port, f"{i}", rate // 4, 1, log) for i in range(4)))
        return log[-1][0]

    assert run(main(), late_s=late_s) == pytest.approx(1.0, rel=0.01)


def test_it_sleeps_until_a_grant_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real loop, whose timers are due at whole ms only."""
    fired = 0
    timer_fired = Port._timer_fired

    def counting(port: Port) -> None:
        nonlocal fired
        fired += 1
        timer_fired(port)

    monkeypatch.setattr(Port, "_timer_fired", counting)
    grants = 40
    rate = int(MIN_GRANT / 0.00537)  # what is left of a ms is less than half of one
    uvloop.run(transfer(Port(rate), "a", grants * MIN_GRANT, 1, Log()))
    assert fired <= 2 * grants


def test_one_transfer_alone_has_the_whole_rate() -> None:
    async def main() -> float:
        port, log = Port(RATE), Log()
        await transfer(port, "a", RATE, 1, log)
        return log[-1][0]

    assert run(main(), late_s=0.001) == pytest.approx(1.0, rel=0.01)


def test_an_idle_port_saves_nothing_up() -> None:
    async def main() -> Log:
        port, log = Port(RATE), Log()
        await transfer(port, "a", MIN_GRANT, 1, log)
        await asyncio.sleep(5)
        await transfer(port, "b", 3 * MIN_GRANT, 1, log)
        return log

    log = run(main())
    assert [round((when - 5) * RATE / MIN_GRANT) for when, _, _ in log[1:]] == [0, 1, 2]


def test_the_most_urgent_first_and_whole_transfers_in_order() -> None:
    async def main() -> Log:
        port, log = Port(RATE), Log()
        await asyncio.gather(
            transfer(port, "late", 3 * MIN_GRANT, 5, log),
            transfer(port, "first", 3 * MIN_GRANT, 2, log),
            transfer(port, "second", 3 * MIN_GRANT, 2, log),
            transfer(port, "urgent", 3 * MIN_GRANT, 1, log),
        )
        return log

    names = [name for _, name, _ in run(main())]
    # `late` asked when nobody else was there, and had one grant.
    assert names == ["late", *["urgent"] * 3, *["first"] * 3, *["second"] * 3, *["late"] * 2]


def test_a_lane_has_one_grant_at_a_time() -> None:
    async def main() -> None:
        port, log = Port(RATE), Log()
        async with port.grant("lane", port.arrive(1), MIN_GRANT):
            same = asyncio.create_task(transfer(port, "same", 1, 1, log, lane="lane"))
            await transfer(port, "other", 1, 9, log)
            await asyncio.sleep(1)
            assert [name for _, name, _ in log] == ["other"]
        await same

    run(main())


def test_messages_are_accounted() -> None:
    async def main() -> float:
        port, log = Port(RATE), Log()
        port.charge(RATE // 2)
        await transfer(port, "a", MIN_GRANT, 1, log)
        return log[0][0]

    assert run(main()) == pytest.approx(0.5)


def test_unpaced_one_transfer_at_a_time_unless_it_is_stuck() -> None:
    async def main() -> None:
        port, log = Port(0, width=1), Log()
        turn = port.arrive(1)
        async with port.grant("slow", turn, MIN_GRANT):
            other = asyncio.create_task(transfer(port, "other", 1, 9, log))
            await asyncio.sleep(PATIENCE_S / 2)
            assert not log
            await asyncio.sleep(PATIENCE_S)
            assert [(name, nbytes) for _, name, nbytes in log] == [("other", 1)]
            assert log[0][0] == pytest.approx(PATIENCE_S)
        await other
        started = now()
        await transfer(port, "more", 10 * MIN_GRANT, 1, log)
        assert now() == started

    run(main())


def test_not_exclusive_and_unpaced_never_waits() -> None:
    async def main() -> None:
        port = Port(0)
        async with port.grant("a", port.arrive(1), 1 << 30), port.grant("b", port.arrive(2), 1):
            assert now() == 0

    run(main())


def test_grants_grow_with_the_rate() -> None:
    assert Port(10_000_000).grant_bytes == MIN_GRANT
    assert Port(100_000_000_000).grant_bytes == MAX_GRANT
    assert Port(0).grant_bytes == MIN_GRANT


def test_a_cancelled_wait_costs_nothing() -> None:
    async def main() -> float:
        port, log = Port(RATE), Log()
        waits = [asyncio.create_task(transfer(port, f"{i}", RATE, 1, log)) for i in range(5)]
        await asyncio.sleep(0.1)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        started = now()
        await transfer(port, "after", RATE // 10, 1, log)
        return now() - started

    assert run(main()) == pytest.approx(0.1, rel=0.02)


def test_cancelled_at_the_moment_of_its_grant() -> None:
    async def main() -> None:
        port, log = Port(RATE), Log()
        async with port.grant("lane", port.arrive(1), MIN_GRANT):
            waiting = asyncio.create_task(transfer(port, "gone", 1, 1, log, lane="lane"))
            await asyncio.sleep(1)
        await asyncio.sleep(0)  # the grant is given now; its task has not run yet
        waiting.cancel()
        await asyncio.wait([waiting])
        await transfer(port, "next", 1, 1, log, lane="lane")

    run(main())


@given(
    st.lists(
        st.tuples(
            st.floats(0, 0.3), st.integers(1, 40 * MIN_GRANT), st.integers(0, 3), st.booleans()
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([0.0, 0.001]),
)
def test_never_faster_than_the_rate(
    plan: list[tuple[float, int, int, bool]], late_s: float
) -> None:
    """No window has more bytes than the rate allows, one grant more, and what a late timer cost."""

    async def main() -> Log:
        port, log = Port(RATE), Log()

        async def one(index: int, start: float, nbytes: int, priority: int, cancel: bool) -> None:
            await asyncio.sleep(start)
            work = asyncio.create_task(transfer(port, f"{index}", nbytes, priority, log))
            if cancel:
                await asyncio.sleep(0.01)
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work

        await asyncio.gather(*(one(index, *each) for index, each in enumerate(plan)))
        return log

    log = run(main(), late_s=late_s)
    allowance = 2 * MIN_GRANT + (LATENESS_S + QUIET_S) * RATE
    for start, (begin, _, _) in enumerate(log):
        moved = 0
        for when, _, nbytes in log[start:]:
            moved += nbytes
            assert moved <= (when - begin) * RATE + allowance
    for index, (_, nbytes, _, cancelled) in enumerate(plan):
        if not cancelled:
            assert sum(part for _, name, part in log if name == f"{index}") == nbytes


@pytest.mark.parametrize("rate", [RATE, 0])
def test_flows_share_the_port_evenly_whatever_their_priorities(rate: int) -> None:
    async def main() -> Log:
        port, log = Port(rate, width=1), Log()

        async def one(flow: str, priority: int, transfers: int) -> None:
            for number in range(transfers):
                turn = port.arrive(priority, flow)
                for _ in range(10):
                    async with port.grant(f"{flow}{priority}{number}", turn, MIN_GRANT):
                        log.append((now(), flow, MIN_GRANT))
                        await asyncio.sleep(0)

        # One flow has two transfers at a time, and more urgent ones.
        await asyncio.gather(one("urgent", 1, 6), one("urgent", 2, 6), one("patient", 9, 6))
        return log

    flows = [flow for _, flow, _ in run(main())]
    while_both = flows[: len(flows) - flows[::-1].index("patient")]
    assert while_both.count("patient") == 60
    assert abs(while_both.count("urgent") - 60) <= 2


@pytest.mark.parametrize("rate", [RATE, 0])
def test_kv_gets_nine_parts_of_the_port_for_one_of_weights(rate: int) -> None:
    """And weights go on, however much KV there is."""

    async def main() -> Log:
        port, log = Port(rate, width=1), Log()

        async def one(flow: str, grants: int) -> None:
            turn = port.arrive(0 if flow == SERVING_FLOW else 1, flow)
            for _ in range(grants):
                async with port.grant(flow, turn, MIN_GRANT):
                    log.append((now(), flow, MIN_GRANT))
                    await asyncio.sleep(0)

        await asyncio.gather(one("model", 100), one(SERVING_FLOW, 90))
        return log

    flows = [flow for _, flow, _ in run(main())]
    while_both = flows[: len(flows) - flows[::-1].index(SERVING_FLOW)]
    assert while_both.count(SERVING_FLOW) == 90
    assert abs(while_both.count("model") - 90 / SERVING_PARTS) <= 1


def test_a_flow_that_was_away_saved_nothing_up() -> None:
    async def main() -> list[str]:
        port, log = Port(RATE), Log()
        await transfer(port, "short", 2 * MIN_GRANT, 1, log, flow="b")
        long = asyncio.create_task(transfer(port, "long", 30 * MIN_GRANT, 1, log, flow="a"))
        await asyncio.sleep(15 * MIN_GRANT / RATE)
        await transfer(port, "back", 10 * MIN_GRANT, 1, log, flow="b")
        mixed = [name for _, name, _ in log]
        await long
        return mixed[mixed.index("back") :]

    names = run(main())
    assert abs(names.count("long") - names.count("back")) <= 1
