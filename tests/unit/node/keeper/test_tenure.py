"""Who owns a keeper's memories, whatever happens in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.keeper.tenure import (
    ALIVE_S,
    HUNG_S,
    LATE_S,
    Command,
    End,
    Grant,
    Illegal,
    Kill,
    State,
    Tenure,
    Wait,
)

KEEP_S = 60.0
A, B, C = 1, 2, 3


def test_the_first_process_is_the_owner_and_others_wait_in_line() -> None:
    tenure = Tenure(KEEP_S, 0.0)
    assert tenure.claimed(A, 1.0) == [Grant(A)]
    assert tenure.claimed(B, 1.0) == [Wait(B, A)]
    assert tenure.claimed(C, 1.0) == [Wait(C, A)]
    assert tenure.claimed(B, 1.0) == []
    assert tenure.closed(A, 2.0) == [Kill(A)]
    assert tenure.died(A, 2.0) == [Grant(B), Wait(C, B)]


def test_nobody_gets_the_memories_before_the_owner_is_dead() -> None:
    """It may have closed its connection, or lost it, and still write."""
    tenure = Tenure(KEEP_S, 0.0)
    tenure.claimed(A, 0.0)
    assert tenure.closed(A, 1.0) == []
    assert tenure.claimed(B, 2.0) == [Wait(B, A), Kill(A)]
    assert tenure.tick(10.0) == []
    assert tenure.died(A, 20.0) == [Grant(B)]


def test_an_owner_that_hangs_is_killed_once_another_waits() -> None:
    tenure = Tenure(KEEP_S, 0.0)
    tenure.claimed(A, 0.0)
    tenure.heard(A, 5.0)
    assert tenure.tick(50.0) == []  # nobody would take its place
    assert tenure.due(50.0) is None
    tenure.heard(A, 50.0)
    tenure.claimed(B, 51.0)
    assert ticks(tenure, 51.0, 50.0 + HUNG_S - 0.01) == []
    assert ticks(tenure, 50.0 + HUNG_S - 0.01, 50.0 + HUNG_S) == [Kill(A)]
    assert tenure.died(A, 60.0) == [Grant(B)]


def test_a_frozen_machine_is_no_silence_of_the_owner() -> None:
    tenure = Tenure(KEEP_S, 0.0)
    tenure.claimed(A, 0.0)
    tenure.claimed(B, 0.0)
    due = tenure.due(0.0)
    assert due == ALIVE_S
    woken = due + LATE_S + 100.0
    assert tenure.tick(woken) == []
    assert ticks(tenure, woken, woken + HUNG_S) == [Kill(A)]


@pytest.mark.parametrize("orphan", [False, True])
def test_memories_that_nobody_claims_are_freed(orphan: bool) -> None:
    tenure = Tenure(KEEP_S, 0.0)
    assert tenure.due(0.0) == KEEP_S
    tenure.claimed(A, 1.0)
    tenure.closed(A, 5.0)
    if not orphan:
        tenure.died(A, 5.0)
    assert tenure.due(6.0) == 5.0 + KEEP_S
    assert tenure.tick(4.9 + KEEP_S) == []
    assert tenure.tick(5.0 + KEEP_S) == [End()]
    assert tenure.claimed(B, 70.0) == []


def test_a_step_that_is_not_in_the_table_is_a_bug() -> None:
    tenure = Tenure(KEEP_S, 0.0)
    tenure.claimed(A, 0.0)
    with pytest.raises(Illegal, match="from owned to free"):
        tenure.died(A, 1.0)


def ticks(tenure: Tenure, since: float, until: float) -> list[Command]:
    """Ticks as often as is asked for."""
    commands = tenure.tick(since)
    while (due := tenure.due(since)) is not None and due < until:
        since = max(due, since + 0.001)
        commands += tenure.tick(since)
    return [*commands, *tenure.tick(until)]


class World:
    """Processes as a kernel runs them: whoever was killed dies later."""

    def __init__(self) -> None:
        self.tenure = Tenure(KEEP_S, 0.0)
        self.now = 0.0
        self.alive: set[int] = set()
        self.connected: set[int] = set()
        self.writes: set[int] = set()
        """Processes that were granted the memories and are not dead."""
        self.over = False

    def do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Grant(client):
                    assert self.writes <= {client}, "two processes can write"
                    self.writes.add(client)
                case Kill(client):
                    assert client in self.writes
                    self.connected.discard(client)
                case End():
                    self.over = True
        self.tenure.validate()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "close", "die", "alive", "pass"]),
            st.integers(0, 7),
            st.floats(0, 2 * KEEP_S),
        ),
        max_size=60,
    )
)
def test_two_processes_never_have_the_memories_and_a_dead_one_never_blocks(
    happens: list[tuple[str, int, float]],
) -> None:
    world = World()
    tenure = world.tenure
    for what, client, passes in happens:
        if world.over:
            break
        world.now += passes if what == "pass" else 0.01
        if what == "start" and client not in world.alive:
            world.alive.add(client)
            world.connected.add(client)
            world.do(tenure.claimed(client, world.now))
        elif what == "close" and client in world.connected:
            world.connected.discard(client)
            world.do(tenure.closed(client, world.now))
        elif what == "die" and client in world.alive:
            world.alive.discard(client)
            world.connected.discard(client)
            world.do(tenure.closed(client, world.now))  # whoever waits has it killed, to be sure
            world.writes.discard(client)
            world.do(tenure.died(client, world.now))
        elif what == "alive":
            tenure.heard(client, world.now)
        world.do(tenure.tick(world.now))
        tenure.due(world.now)
    for client in sorted(world.alive - world.connected):  # the kernel's word comes in the end
        world.alive.discard(client)
        world.do(tenure.closed(client, world.now))
        world.writes.discard(client)
        world.do(tenure.died(client, world.now))
    if world.connected and not world.over:
        assert tenure.state is State.OWNED
        assert tenure.owner in world.connected
