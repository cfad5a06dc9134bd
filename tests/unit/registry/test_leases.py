import pytest

from services.registry.core import leases as leases_module
from services.registry.core.leases import (
    LEASELESS_S,
    REMEMBERED_NODES,
    SILENCE_S,
    Leases,
    State,
)
from shared.errors import IllegalTransition
from shared.ids import Generation, NodeId
from shared.messages.pool import NodeGone, NodeInfo, NodeJoined
from shared.story import Story
from tests.unit.registry.builders import hear_others, info

A = NodeId("a")
ONE = Generation(1)
LATE = 5.0
"""Long enough after a renewal that a key that goes was not deleted by its owner."""


@pytest.fixture
def leases() -> Leases:
    leases = Leases()
    leases.put(info(), now=0.0)
    return leases


def joined(info: NodeInfo) -> NodeJoined:
    return NodeJoined(info=info, cause="lease_put")


def test_a_new_lease_is_announced_once() -> None:
    leases = Leases()
    assert leases.put(info(), 0.0) == [joined(info())]
    assert leases.put(info(), 1.0) == []
    assert leases.standing == (info(),)


def test_a_changed_address_is_announced(leases: Leases) -> None:
    moved = info(address="tcp://10.0.0.2:7001")
    assert leases.put(moved, 1.0) == [joined(moved)]


def test_another_generation_ends_the_older_first(leases: Leases) -> None:
    gone, came = leases.put(info(generation=2), 1.0)
    assert isinstance(gone, NodeGone)
    assert (gone.node, gone.generation) == (A, ONE)
    assert came == joined(info(generation=2))


def test_a_lease_given_back_ends_the_node_at_once(leases: Leases) -> None:
    leases.heard(A, ONE, 0.1)
    (gone,) = leases.dropped(A, 0.2)
    reason = "it gave its lease back"
    assert gone == NodeGone(
        node=A, generation=ONE, reason=reason, graceful=True, cause="lease_deleted"
    )
    assert leases.present == ()


def test_a_silent_node_is_gone_when_its_lease_expires(leases: Leases) -> None:
    leases.heard(A, ONE, LATE - SILENCE_S)
    hear_others(leases, LATE)
    (gone,) = leases.dropped(A, LATE)
    assert isinstance(gone, NodeGone)
    assert "silent" in gone.reason
    assert gone.cause == "lease_expired"


def test_after_an_outage_of_the_bus_nodes_have_time_to_speak(leases: Leases) -> None:
    assert leases.dropped(A, LATE) == [], "it is the registry that was cut off"
    assert leases.overdue(LATE + SILENCE_S - 0.1) == []
    (gone,) = leases.overdue(LATE + SILENCE_S)
    assert isinstance(gone, NodeGone)


def test_who_speaks_after_an_outage_is_not_gone(leases: Leases) -> None:
    leases.dropped(A, LATE)
    leases.heard(A, ONE, LATE + 0.3)
    assert leases.overdue(LATE + SILENCE_S) == []
    assert leases.put(info(), LATE + SILENCE_S) == []
    assert leases.standing == (info(),)


def test_a_node_that_reports_is_in_doubt_when_its_lease_expires(leases: Leases) -> None:
    leases.heard(A, ONE, LATE - 0.5)
    assert leases.dropped(A, LATE) == []
    assert leases.present == (info(),)
    assert leases.standing == ()


def test_the_story_says_what_became_of_a_node_and_why() -> None:
    story = Story()
    leases = Leases(story)
    leases.put(info(), 0.0)
    leases.heard(A, ONE, LATE)
    leases.dropped(A, LATE)
    hear_others(leases, LATE + SILENCE_S)
    leases.overdue(LATE + SILENCE_S)
    assert [(t.cause, t.text) for t in story.of("a")] == [
        ("lease_put", "generation 1 standing"),
        ("lease_expired", "generation 1 in doubt"),
        ("lease_expired", "generation 1 over: its lease expired and it is silent"),
    ]


def test_a_step_that_the_table_does_not_have_tells_the_story(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(leases_module._STEPS, State.STANDING, frozenset())
    with pytest.raises(IllegalTransition, match="so far: generation 1 standing"):
        leases.dropped(A, LATE)


@pytest.mark.parametrize("to", [State.STANDING, State.IN_DOUBT])
def test_what_is_over_has_no_next_state(leases: Leases, to: State) -> None:
    lease = leases._leases[A]
    leases.put(info(generation=2), 1.0)
    with pytest.raises(IllegalTransition, match=f"a: over -> {to.value} is not a step"):
        leases._step(lease, to, 2.0, "lease_watch")


def test_what_is_over_is_not_remembered_of_ever_more_names() -> None:
    leases = Leases()
    names = [f"n{number}" for number in range(REMEMBERED_NODES + 1)]
    for name in names:
        leases.put(info(name), 0.0)
        leases.dropped(NodeId(name), 0.1)
    leases.validate()
    assert not leases.is_over(NodeId(names[0]), ONE)
    assert leases.is_over(NodeId(names[1]), ONE)
    assert leases.is_over(NodeId(names[-1]), ONE)


def test_doubt_ends_with_silence(leases: Leases) -> None:
    leases.heard(A, ONE, LATE)
    leases.dropped(A, LATE)
    assert leases.overdue(LATE + SILENCE_S - 0.1) == []
    assert [type(change) for change in leases.overdue(LATE + SILENCE_S)] == [NodeGone]


def test_doubt_ends_well_with_the_lease(leases: Leases) -> None:
    leases.heard(A, ONE, LATE)
    leases.dropped(A, LATE)
    assert leases.put(info(), LATE + 1) == []
    assert leases.overdue(LATE + 100) == []
    assert leases.standing == (info(),)


def test_reports_alone_do_not_keep_a_node_for_ever(leases: Leases) -> None:
    leases.heard(A, ONE, LATE)
    leases.dropped(A, LATE)
    leases.heard(A, ONE, LATE + LEASELESS_S)
    (gone,) = leases.overdue(LATE + LEASELESS_S)
    assert isinstance(gone, NodeGone)
    assert "renewed no lease" in gone.reason
    assert gone.cause == "lease_expired", "what brought the doubt"


def test_reports_of_another_generation_do_not_count(leases: Leases) -> None:
    hear_others(leases, LATE)
    leases.heard(A, Generation(2), LATE)
    assert [type(change) for change in leases.dropped(A, LATE)] == [NodeGone]


def test_a_generation_that_is_over_stays_over(leases: Leases) -> None:
    leases.put(info(generation=2), 1.0)
    (told,) = leases.put(info(generation=1), 2.0)
    assert isinstance(told, NodeGone)
    assert told.generation == ONE
    assert leases.present == (info(generation=2),)


def test_a_lower_generation_is_a_node_too_since_clocks_are_set_back(leases: Leases) -> None:
    changes = leases.put(info(generation=0), 1.0)
    assert [type(change) for change in changes] == [NodeGone, NodeJoined]


def test_leases_missing_when_a_watch_begins_are_in_doubt(leases: Leases) -> None:
    leases.put(info("b"), 0.0)
    leases.heard(A, ONE, LATE)
    leases.heard(NodeId("b"), ONE, LATE)
    assert leases.only({NodeId("b")}, LATE) == []
    assert leases.standing == (info("b"),)
    assert leases.present == (info(), info("b"))


def test_a_restored_node_is_announced_again_when_its_lease_shows() -> None:
    leases = Leases()
    leases.restore(info(), 0.0)
    assert leases.standing == ()
    assert leases.put(info(), 0.1) == [joined(info())]


def test_a_restored_node_without_a_lease_is_gone_after_silence() -> None:
    leases = Leases()
    leases.restore(info(), 0.0)
    assert leases.only(set(), 0.1) == []
    assert [type(change) for change in leases.overdue(SILENCE_S)] == [NodeGone]


def test_a_key_that_nobody_knows_may_go(leases: Leases) -> None:
    assert leases.dropped(NodeId("unknown"), 1.0) == []
