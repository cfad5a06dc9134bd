from collections.abc import Callable

import msgspec
import pytest

from services.registry.core.leases import SILENCE_S
from services.registry.core.placement import Target
from services.registry.core.pool import Pool, ReservationEnded, ReservationMade
from services.registry.core.reservations import Reservation
from shared.errors import BadInput, Conflict, NotFound
from shared.ids import EventId, ModelName, NodeId
from shared.messages.pool import NodeGone, NodeJoined, PoolQuery, Profile, Tier, Unreserve
from shared.parts import Part
from tests.unit.registry.builders import (
    EVENT,
    MODEL,
    OTHER,
    hear_others,
    holding,
    info,
    record,
    reserve,
    status,
)

EV2 = EventId("ev-2")
LATE = 5.0


@pytest.fixture
def pool() -> Pool:
    """Nodes a, b and c with room, of which b holds a block; two models."""
    pool = Pool()
    pool.catalog.put(record())
    pool.catalog.put(record("other", OTHER))
    for name in "abc":
        pool.lease_put(info(name), 0.0)
        held = [holding(Tier.HOST, 0)] if name == "b" else []
        pool.status(status(name, *held), 0.0)
    return pool


def names(targets: tuple[Target, ...]) -> list[str]:
    return [target.info.node for target in targets]


def test_reserves_the_best_nodes(pool: Pool) -> None:
    targets, effects = pool.reserve(reserve(2))
    assert names(targets) == ["b", "a"]
    assert [e.reservation.node for e in effects if isinstance(e, ReservationMade)] == ["b", "a"]


def test_groups_are_reserved_part_by_part(pool: Pool) -> None:
    first, second = cut = Part(0, 2), Part(2, 4)
    asked = msgspec.structs.replace(reserve(2, nbytes=900), groups=(cut,))
    targets, effects = pool.reserve(asked)
    made = [e.reservation for e in effects if isinstance(e, ReservationMade)]
    assert [(r.node, r.part) for r in made] == [("a", first), ("c", second)], "b has other blocks"
    assert names(targets) == ["a", "c"]
    again, effects = pool.reserve(asked)
    assert (names(again), effects) == (["a", "c"], [])
    with pytest.raises(BadInput, match="no blocks 3-4"):
        pool.reserve(msgspec.structs.replace(asked, groups=((Part(3, 5),),)))


def test_an_unfit_node_gets_nothing_new(pool: Pool) -> None:
    hangs = msgspec.structs.replace(status("b", seq=2), unfit="its engine hangs")
    pool.status(hangs, 1.0)
    targets, _ = pool.reserve(reserve(3))
    assert names(targets) == ["a", "c"]
    (view,) = [v for v in pool.page(PoolQuery(holdings=True)).nodes if v.info.node == "b"]
    assert view.unfit == "its engine hangs"


def test_asking_again_gives_the_same_nodes_and_reserves_no_more(pool: Pool) -> None:
    first, _ = pool.reserve(reserve(2))
    again, effects = pool.reserve(reserve(2))
    assert names(again) == names(first)
    assert {target.reason.split(",")[0] for target in again} == {"the event's already"}
    assert effects == []


def test_the_answer_is_best_first_whatever_the_event_had(pool: Pool) -> None:
    pool.reserve(reserve(1, "b"))
    targets, _ = pool.reserve(reserve(2))
    assert names(targets) == ["b", "a"]


def test_asking_again_without_them_gives_others(pool: Pool) -> None:
    pool.reserve(reserve(2))
    targets, _ = pool.reserve(reserve(2, "a", "b"))
    assert names(targets) == ["c"]


def test_the_events_own_nodes_stay_targets_when_its_arena_has_filled_them(pool: Pool) -> None:
    pool.reserve(reserve(1))
    pool.status(status("b", free=0, seq=2), 1.0)
    targets, _ = pool.reserve(reserve(1))
    assert names(targets) == ["b"]


def test_a_node_belongs_to_one_event(pool: Pool) -> None:
    pool.reserve(reserve(2))
    targets, _ = pool.reserve(reserve(3, event=EV2))
    assert names(targets) == ["c"]


def test_no_node_left_is_no_error(pool: Pool) -> None:
    pool.reserve(reserve(3))
    assert pool.reserve(reserve(1, event=EV2)) == ((), [])


def test_an_event_moves_one_model(pool: Pool) -> None:
    pool.reserve(reserve(1))
    with pytest.raises(Conflict, match="one event moves one model"):
        pool.reserve(reserve(1, model_id=OTHER))


def test_negative_counts_and_sizes_are_bad_input(pool: Pool) -> None:
    with pytest.raises(BadInput, match="must not be negative"):
        pool.reserve(reserve(-1))
    with pytest.raises(BadInput, match="must not be negative"):
        pool.reserve(reserve(1, nbytes=-1))


def test_models_that_are_not_published_are_not_found(pool: Pool) -> None:
    pool.catalog.remove(record().name)
    with pytest.raises(NotFound):
        pool.reserve(reserve(1))
    with pytest.raises(NotFound):
        pool.sources(MODEL)
    with pytest.raises(NotFound):
        pool.copies(MODEL)


def test_unreserve_frees_all_or_some(pool: Pool) -> None:
    pool.reserve(reserve(3))
    pool.unreserve(Unreserve(event=EVENT, nodes=(NodeId("b"),)))
    assert [r.node for r in pool.reservations.all] == ["a", "c"]
    pool.unreserve(Unreserve(event=EVENT))
    assert pool.reservations.all == ()


def test_unreserve_leaves_the_nodes_of_others_alone(pool: Pool) -> None:
    pool.reserve(reserve(1))
    assert pool.unreserve(Unreserve(event=EV2, nodes=(NodeId("b"),))) == []
    assert pool.unreserve(Unreserve(event=EV2)) == []
    assert [r.event for r in pool.reservations.all] == [EVENT]


def test_a_new_generation_loses_reservation_and_holdings(pool: Pool) -> None:
    pool.reserve(reserve(1))
    effects = pool.lease_put(info("b", generation=2), 1.0)
    assert [type(e) for e in effects] == [NodeGone, ReservationEnded, NodeJoined]
    assert pool.reservations.all == ()
    assert pool.sources(MODEL) == ()


def test_a_late_report_of_the_old_generation_does_not_bring_it_back(pool: Pool) -> None:
    pool.lease_put(info("b", generation=2), 1.0)
    (told,) = pool.status(status("b", holding(Tier.GPU, 0, 1, 2, 3), seq=9), 1.1)
    assert isinstance(told, NodeGone)
    assert told.generation == 1
    assert pool.sources(MODEL) == ()


def test_a_report_may_overtake_its_lease(pool: Pool) -> None:
    pool.status(status("d", holding(Tier.GPU, 0, 1, 2, 3)), 1.0)
    assert "d" not in [s.info.node for s in pool.sources(MODEL)]
    pool.lease_put(info("d"), 1.1)
    assert pool.sources(MODEL)[0].info.node == "d"


def test_a_node_in_doubt_keeps_its_reservation_and_gets_nothing_new(pool: Pool) -> None:
    pool.reserve(reserve(1))
    pool.status(status("b", holding(Tier.HOST, 0), seq=2), LATE)
    assert pool.lease_dropped(NodeId("b"), LATE) == []
    assert pool.sources(MODEL) == ()
    assert names(pool.reserve(reserve(3, event=EV2))[0]) == ["a", "c"]
    assert pool.reservations.of(NodeId("b")) is not None
    assert pool.lease_put(info("b"), LATE + 1) == []
    assert [s.info.node for s in pool.sources(MODEL)] == ["b"]


def test_a_dead_node_loses_its_reservation(pool: Pool) -> None:
    pool.reserve(reserve(1))
    hear_others(pool.leases, LATE)
    pool.lease_dropped(NodeId("b"), LATE)
    assert pool.reservations.all == ()
    assert [i.node for i in pool.leases.present] == ["a", "c"]


def test_the_story_of_a_reservation_says_what_ended_it(pool: Pool) -> None:
    pool.reserve(reserve(2))
    hear_others(pool.leases, LATE)
    pool.lease_dropped(NodeId("b"), LATE)
    pool.unreserve(Unreserve(event=EVENT))
    assert [(t.cause, t.subjects[1], t.text) for t in pool.story.of(EVENT)] == [
        (EVENT, "b", "reserved"),
        (EVENT, "a", "reserved"),
        (
            "lease_expired",
            "b",
            "reservation ended: its node is gone: its lease expired and it is silent",
        ),
        (EVENT, "a", "reservation ended: unreserved"),
    ]


def test_a_generation_that_is_over_is_told_so_by_cause_of_its_report(pool: Pool) -> None:
    pool.lease_put(info("b", generation=2), 1.0)
    (told,) = pool.status(status("b", seq=9), 1.1)
    assert isinstance(told, NodeGone)
    assert told.cause == "node_status"


def test_a_node_that_is_gone_puts_only_what_it_held_at_risk(pool: Pool) -> None:
    hear_others(pool.leases, LATE)
    (gone,) = pool.lease_dropped(NodeId("b"), LATE)
    assert isinstance(gone, NodeGone)
    assert [(r.name, c.missing) for r, c in pool.copies_after(gone)] == [("llama", (0, 1, 2, 3))]
    (gone,) = pool.lease_dropped(NodeId("a"), LATE)
    assert isinstance(gone, NodeGone)
    assert pool.copies_after(gone) == []


def test_what_another_disk_holds_whole_is_not_at_risk(pool: Pool) -> None:
    for name in "abc":
        held = [holding(Tier.DISK, *range(2 if name == "c" else 4))]
        pool.status(status(name, *held, seq=2), 0.0)
    hear_others(pool.leases, LATE)
    (gone,) = pool.lease_dropped(NodeId("b"), LATE)
    assert isinstance(gone, NodeGone)
    assert pool.copies_after(gone) == []
    (gone,) = pool.lease_dropped(NodeId("a"), LATE)
    assert isinstance(gone, NodeGone)
    assert [(r.name, c.missing) for r, c in pool.copies_after(gone)] == [("llama", (2, 3))]


def test_ticks_end_what_is_in_doubt_for_too_long(pool: Pool) -> None:
    pool.status(status("b", seq=2), LATE)
    pool.lease_dropped(NodeId("b"), LATE)
    (gone,) = pool.tick(LATE + SILENCE_S)
    assert isinstance(gone, NodeGone)


def test_the_view_tells_who_reserved_what(pool: Pool) -> None:
    pool.reserve(reserve(1))
    pool.lease_put(info("new"), 0.0)
    view = pool.page(PoolQuery())
    assert {v.info.node: v.reserved_by for v in view.nodes} == {
        "a": None,
        "b": EVENT,
        "c": None,
        "new": None,
    }
    assert view.nodes[1].holdings == (holding(Tier.HOST, 0),)


def test_the_view_tells_what_nodes_measured(pool: Pool) -> None:
    profile = Profile(in_bytes_per_s=1e9)
    pool.status(msgspec.structs.replace(status("a", seq=2), running=3, profile=profile), 0.1)
    views = pool.page(PoolQuery()).nodes[:2]
    assert [(v.running, v.profile) for v in views] == [(3, profile), (0, Profile())]


def test_a_view_without_holdings_tells_who_is_there_and_who_reserved_what(pool: Pool) -> None:
    pool.reserve(reserve(1))
    views = pool.page(PoolQuery(holdings=False)).nodes
    assert [(v.info.node, v.reserved_by, v.holdings) for v in views] == [
        ("a", None, ()),
        ("b", EVENT, ()),
        ("c", None, ()),
    ]


def test_the_view_tells_of_the_kv_cache(pool: Pool) -> None:
    counted = {
        "kv_used": 16, "kv_capacity": 64, "prompt_tokens": 90, "cached_tokens": 32,
        "preemptions": 2,
    }  # fmt: skip
    pool.status(msgspec.structs.replace(status("a", seq=2), **counted), 0.1)
    view = pool.page(PoolQuery()).nodes[0]
    assert {name: getattr(view, name) for name in counted} == counted


def kept(node: str, generation: int = 1) -> Reservation:
    of = info(node, generation)
    return Reservation(node=of.node, generation=of.generation, event=EVENT, model_id=MODEL)


def mislabel(pool: Pool) -> None:
    pool.catalog._by_name[ModelName("nobody")] = record()


def move_two_models(pool: Pool) -> None:
    pool.reserve(reserve(1))
    pool.reservations.add(msgspec.structs.replace(kept("a"), model_id=OTHER))


def reserve_who_is_not_there(pool: Pool) -> None:
    pool.reservations.add(kept("x"))


@pytest.mark.parametrize("corrupt", [mislabel, move_two_models, reserve_who_is_not_there])
def test_parts_that_contradict_each_other_do_not_pass(
    pool: Pool, corrupt: Callable[[Pool], None]
) -> None:
    pool.validate()
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.validate()


def test_after_a_restart_reservations_of_the_same_generation_hold() -> None:
    pool = Pool()
    pool.restore([info("a"), info("b"), info("c")], [kept("a"), kept("b"), kept("x")], 0.0)
    pool.lease_put(info("a"), 0.1)
    effects = pool.lease_put(info("b", generation=2), 0.1)
    assert ReservationEnded in [type(e) for e in effects]
    effects = pool.leases_are({NodeId("a"), NodeId("b")}, 0.1)
    assert [e.reservation.node for e in effects if isinstance(e, ReservationEnded)] == ["x"]
    assert pool.reservations.all == (kept("a"),)


def test_a_node_that_died_during_the_restart_is_told_to_be_gone() -> None:
    pool = Pool()
    pool.restore([info("c")], [kept("c")], 0.0)
    pool.leases_are(set(), 0.1)
    gone, ended = pool.tick(SILENCE_S)
    assert isinstance(gone, NodeGone)
    assert ended == ReservationEnded(kept("c"), f"its node is gone: {gone.reason}")
