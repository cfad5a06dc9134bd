"""The order of targets and sources, one thing that counts after the other."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.registry.core.placement import Candidate, Sender, choose, rank, sender_rank
from shared.messages.pool import Source, Tier
from tests.unit.registry.builders import info

BLOCKS = 4


def node(name: str, rack: str = "") -> Candidate:
    return Candidate(msgspec.structs.replace(info(name), rack=rack), free=500)


BETTER: list[dict[str, Any]] = [
    {"in_memory": 1},
    {"on_device": 1},
    {"on_disk": 4},
    {"active": 0},
    {"beside": True},
    {"rate": 200.0},
    {"sending": False},
    {"asleep": 0},
    {"source_rack": True},
    {"crowd": 0},
    {"free": 400},
]
PLAIN = replace(node("b"), active=2, rate=100.0, sending=True, asleep=2, crowd=2)
"""Worse than any of these in that one thing."""


@pytest.mark.parametrize("place", range(len(BETTER)), ids=lambda i: next(iter(BETTER[i])))
def test_the_first_thing_that_differs_decides(place: int) -> None:
    """Better in one thing outweighs all those that come after it."""
    later = {key: value for better in BETTER[place + 1 :] for key, value in better.items()}
    ahead = replace(PLAIN, info=info("z"), **BETTER[place])
    behind = replace(PLAIN, info=info("a"), **later)
    assert rank(ahead) < rank(behind)


def test_equal_nodes_go_by_name() -> None:
    assert [t.info.node for t in choose([node("b"), node("a")], 2, BLOCKS, ())] == ["a", "b"]


def test_rates_count_by_powers_of_two_so_that_noise_decides_nothing() -> None:
    a, b = replace(node("a"), rate=1.01e9), replace(node("b"), rate=1.05e9)
    assert rank(a) < rank(b)
    assert rank(replace(b, rate=2.1e9)) < rank(a)


def test_the_events_own_nodes_are_chosen_first_and_answered_in_their_order() -> None:
    own, held = replace(node("z"), own=True), replace(node("a"), in_memory=1)
    assert [t.info.node for t in choose([own, held], 1, BLOCKS, ())] == ["z"]
    assert [t.info.node for t in choose([own, held], 2, BLOCKS, ())] == ["a", "z"]


def chosen(count: int, *candidates: Candidate, serving: tuple[str, ...] = ()) -> list[str]:
    return [t.info.node for t in choose(candidates, count, BLOCKS, serving)]


def test_replicas_do_not_all_lie_in_one_rack() -> None:
    near = [replace(node(name, "r1"), source_rack=True) for name in "abc"]
    far = [node("x", "r2"), node("y", "r2")]
    assert chosen(2, *near, *far, serving=("r1",)) == ["a", "x"]
    assert chosen(3, *near, *far) == ["a", "b", "x"]


def test_two_racks_are_enough() -> None:
    near = [replace(node(name, "r1"), source_rack=True) for name in "ab"]
    assert chosen(2, *near, node("x", "r3"), serving=("r1", "r2")) == ["a", "b"]


def test_a_first_replica_needs_no_second_rack() -> None:
    assert chosen(1, node("a", "r1"), node("x", "r2")) == ["a"]


def test_what_is_in_memory_or_the_events_stays_whatever_the_racks() -> None:
    awake = replace(node("a", "r1"), in_memory=4)
    assert chosen(1, awake, node("x", "r2"), serving=("r1",)) == ["a"]
    own = replace(node("a", "r1"), own=True)
    assert chosen(1, own, node("x", "r2"), serving=("r1",)) == ["a"]


def test_one_rack_is_all_there_is() -> None:
    assert chosen(2, node("a", "r1"), node("b", "r1"), serving=("r1",)) == ["a", "b"]


def test_the_answer_says_why() -> None:
    candidates = [
        replace(node("a", "r1"), in_memory=3, own=True),
        replace(node("b", "r1"), on_disk=4, source_rack=True, beside=True),
        replace(node("c", "r2"), active=2, asleep=1, sending=True),
    ]
    reasons = {t.info.node: t.reason for t in choose(candidates, 3, BLOCKS, ())}
    assert reasons == {
        "a": "the event's already, 3 of 4 blocks in memory, an engine for itself",
        "b": "4 of 4 blocks on disk, an engine for itself, a copy on its host, "
        "a source in rack 'r1'",
        "c": "beside 2 other models, its port is sending to another event, "
        "1 other models asleep in its memory",
    }
    (_, spread) = choose([node("a", "r1"), node("b", "r1"), node("x", "r2")], 2, BLOCKS, ())
    assert spread.reason == "another rack than 'r1', which has the rest, an engine for itself"


def sender(name: str, tier: Tier = Tier.GPU, blocks: int = BLOCKS) -> Sender:
    held = tuple(range(blocks))
    return Sender(Source(info(name), tier, held, complete=blocks == BLOCKS))


def test_sources_come_best_first() -> None:
    best_first = [
        replace(sender("z"), rate=200.0, same_rack=True),
        replace(sender("y"), rate=100.0, same_rack=True),
        sender("b"),
        sender("a", Tier.HOST),
        replace(sender("c", Tier.HOST), running=1),
        replace(sender("d"), running=2),
        replace(sender("e"), sending=True),
        sender("f", Tier.HOST, blocks=3),
        sender("g", blocks=2),
        sender("h", Tier.DISK),
        sender("i", Tier.DISK, blocks=1),
    ]
    ranks = [sender_rank(each) for each in best_first]
    assert ranks == sorted(set(ranks))
