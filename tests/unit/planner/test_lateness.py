"""Who is slow, and who only waits for the slow."""

import pytest

from services.planner.core.lateness import Late, Pace, late_transfers
from shared.ids import NodeId
from shared.messages.scaling import Transfer

A, B, C, D = (NodeId(name) for name in "abcd")
CHAIN = [Transfer(1, A, B, 0), Transfer(2, B, C, 0), Transfer(2, A, B, 1), Transfer(3, B, C, 1)]


def late(
    arrived: dict[NodeId, dict[int, float]], now: float, transfers: list[Transfer] = CHAIN
) -> list[Late]:
    """Every transfer should take 0.2 s."""
    return [*late_transfers(transfers, arrived, began=10.0, now=now, expected_s=lambda _: 0.2)]


@pytest.mark.parametrize("now", [10.0, 10.7])
def test_nothing_is_late_before_three_times_its_time_and_half_a_second_more(now: float) -> None:
    assert late({}, now) == []


def test_only_what_others_wait_for_is_late() -> None:
    (only,) = late({}, 11.0, [CHAIN[0], CHAIN[2]])
    assert only == Late(CHAIN[0], 1.0, 0.2)


def test_a_transfer_is_due_when_its_block_and_both_ports_are_there() -> None:
    slow = {B: {0: 11.0}}
    assert [entry.transfer for entry in late(slow, 11.5)] == [CHAIN[0]]
    assert [entry.transfer for entry in late(slow, 11.8)] == CHAIN[:3]


def test_a_sender_is_not_late_with_what_it_waits_for_itself() -> None:
    """From another node, or from its own disk."""
    pace = Pace()
    pace.begin(10.0)
    pace.land(B, {0: 10.1})
    loading: dict[NodeId, set[int]] = {B: {0}, C: set()}
    one = [Transfer(1, B, C, 1)]
    assert pace.look(one, loading, 20.0, lambda _: 0.2) == {}
    loading[B].add(1)
    pace.land(B, {1: 20.0})
    assert pace.look(one, loading, 20.1, lambda _: 0.2) == {}
    assert [*pace.look(one, loading, 21.0, lambda _: 0.2)] == [B]


def test_what_came_late_is_late_for_good() -> None:
    came = {B: {0: 10.2, 1: 10.4}, C: {0: 11.4, 1: 11.6}}
    assert [entry.transfer for entry in late(came, 99.0)] == [CHAIN[1]]


def test_what_nodes_have_not_said_yet_may_be_there() -> None:
    """In large events a node says several blocks at once, for how long it has each. Its regular
    report may name a block before that."""
    held: dict[NodeId, set[int]] = {B: set()}
    one = CHAIN[:1]
    pace = Pace()
    pace.begin(10.0)
    assert pace.look(one, held, 11.4, lambda _: 0.2, untold_s=1.0) == {}
    held[B].add(0)
    pace.land(B, {0: 11.5}, vague=True)
    assert pace.look(one, held, 11.6, lambda _: 0.2, untold_s=1.0) == {}
    pace.land(B, {0: 10.2})
    assert pace.look(one, held, 99.0, lambda _: 0.2, untold_s=1.0) == {}
    pace.begin(10.0)
    pace.land(B, {0: 11.0}, vague=True)
    pace.land(B, {0: 11.0})
    assert [*pace.look(one, held, 11.6, lambda _: 0.2, untold_s=1.0)] == [A]
    pace = Pace()
    pace.begin(10.0)
    assert [*pace.look(one, {B: set()}, 12.0, lambda _: 0.2, untold_s=1.0)] == [A]


def test_a_disk_that_others_read_too_is_not_late_until_they_are_done() -> None:
    pace, held, one = Pace(), {B: set[int]()}, CHAIN[:1]
    pace.begin(10.0)
    for now in (10.5, 11.5, 12.5):
        pace.share([A], now)
        assert pace.look(one, held, now, lambda _: 0.2) == {}
    assert pace.look(one, held, 13.0, lambda _: 0.2) == {}
    assert [*pace.look(one, held, 13.3, lambda _: 0.2)] == [A]


def test_each_slow_sender_is_named_once() -> None:
    pace = Pace()
    pace.begin(10.0)
    held: dict[NodeId, set[int]] = {B: set(), C: set()}
    assert pace.look(CHAIN, held, 10.5, lambda _: 0.2) == {}
    found = pace.look(CHAIN, held, 11.0, lambda _: 0.2)
    assert [*found] == [A]
    assert str(found[A]) == "block 0 from a to b took 1.00 s, not 0.20 s"
    assert pace.look(CHAIN, held, 12.0, lambda _: 0.2) == {}


def test_a_receiver_that_is_late_from_two_senders_is_the_slow_one() -> None:
    pace = Pace()
    pace.begin(10.0)
    both = [Transfer(1, A, C, 0), Transfer(2, B, C, 1)]
    held: dict[NodeId, set[int]] = {C: set()}
    assert [*pace.look(both, held, 11.0, lambda _: 0.2)] == [A]
    held[C].add(0)
    pace.land(C, {0: 11.0})
    assert [*pace.look(both, held, 12.0, lambda _: 0.2)] == [C]
    third = [Transfer(3, D, C, 2)]
    pace.begin(12.0)
    assert pace.look(third, held, 20.0, lambda _: 0.2) == {}


def test_a_new_revision_begins_anew_and_forgets_what_came_before() -> None:
    pace = Pace()
    pace.begin(10.0)
    pace.land(B, {0: 10.1})
    pace.begin(20.0)
    held: dict[NodeId, set[int]] = {B: {0}, C: set()}
    assert pace.look(CHAIN, held, 20.5, lambda _: 0.2) == {}
    assert [*pace.look(CHAIN, held, 21.0, lambda _: 0.2)] == [B]  # which may be why A was late
