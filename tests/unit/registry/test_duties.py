"""What nodes may be used for."""

import msgspec
import pytest

from services.registry.core.duties import NodeDuty
from services.registry.core.pool import DutySaid, Pool
from shared.errors import BadInput, NotFound
from shared.ids import Generation, NodeId
from shared.messages.copies import Leave
from shared.messages.pool import Duty, NodeInfo, NodeJoined, Reserve, SetDuty
from tests.unit.registry.builders import EVENT, MODEL, info, record, status
from tests.unit.registry.test_durable import Nodes, targets

A = NodeId("a")
WALL_NS = 1_000_000_000


def pool() -> Pool:
    """Two nodes without blocks, and a model."""
    made = Pool()
    made.catalog.put(record())
    for node in ("a", "b"):
        made.lease_put(info(node), 0.0)
        made.status(status(node), 0.0)
    return made


def say(to: Pool, duty: Duty, within_s: float = 0.0, node: str = "a") -> list[NodeInfo]:
    """What is announced of the node."""
    wish = SetDuty(node=NodeId(node), duty=duty, within_s=within_s)
    effects = to.set_duty(wish, 1.0, WALL_NS)
    assert [type(effect) for effect in effects][:1] == [DutySaid]
    to.validate()
    return [effect.info for effect in effects if isinstance(effect, NodeJoined)]


def reserved(of: Pool) -> set[str]:
    chosen, _ = of.reserve(Reserve(event=EVENT, model_id=MODEL, count=2, nbytes=400, exclude=()))
    return {target.info.node for target in chosen}


@pytest.mark.parametrize("duty", [Duty.CORDONED, Duty.DRAINING])
def test_a_node_that_is_out_of_use_is_no_target(duty: Duty) -> None:
    up = pool()
    (said,) = say(up, duty)
    assert said.duty is duty
    assert reserved(up) == {"b"}
    (said,) = say(up, Duty.ALL)
    assert said.duty is Duty.ALL
    assert reserved(up) == {"a", "b"}


def test_it_holds_for_later_processes_and_later_registries() -> None:
    up = pool()
    say(up, Duty.DRAINING, within_s=2.0)
    (_, joined) = up.lease_put(info("a", generation=2), 2.0)
    assert isinstance(joined, NodeJoined)
    assert (joined.info.duty, joined.info.leave_by_ns) == (Duty.DRAINING, WALL_NS + 2_000_000_000)
    later = Pool()
    later.duties.restore([NodeDuty(node=A, duty=Duty.CORDONED)])
    later.restore([info("a")], [], 0.0)
    (joined,) = later.lease_put(info("a"), 0.0)
    assert isinstance(joined, NodeJoined)
    assert joined.info.duty is Duty.CORDONED


def test_nothing_is_said_twice_of_a_node_that_renews_its_lease() -> None:
    up = pool()
    say(up, Duty.CORDONED)
    assert up.lease_put(info("a"), 2.0) == []


def test_nodes_do_not_choose_their_duty() -> None:
    up = pool()
    claims = msgspec.structs.replace(info("a"), duty=Duty.CORDONED)
    assert up.lease_put(claims, 2.0) == []
    assert reserved(up) == {"a", "b"}


def test_a_node_that_is_away_keeps_its_duty_and_can_be_taken_back() -> None:
    up = pool()
    say(up, Duty.CORDONED)
    up.lease_dropped(A, 0.5)
    assert say(up, Duty.ALL) == []
    up.lease_put(info("a", generation=2), 3.0)
    known = up.leases.info(A)
    assert known is not None
    assert known.duty is Duty.ALL


def test_what_makes_no_sense_is_refused() -> None:
    up = pool()
    with pytest.raises(NotFound, match="no node 'c'"):
        say(up, Duty.CORDONED, node="c")
    for within_s in (-1.0, 1e30, float("nan")):
        with pytest.raises(BadInput):
            say(up, Duty.DRAINING, within_s=within_s)
    with pytest.raises(BadInput):
        say(up, Duty.CORDONED, within_s=1.0)
    assert reserved(up) == {"a", "b"}


def test_a_process_that_is_about_to_end_is_no_target_and_its_successor_is() -> None:
    up = pool()
    up.leave(Leave(node=A, generation=Generation(1), within_s=2.0), 1.0, WALL_NS)
    known = up.leases.info(A)
    assert known is not None
    assert (known.duty, known.leave_by_ns) == (Duty.ENDING, WALL_NS + 2_000_000_000)
    assert reserved(up) == {"b"}
    up.lease_put(info("a", generation=2), 3.0)
    known = up.leases.info(A)
    assert known is not None
    assert known.duty is Duty.ALL


def test_copies_of_a_node_that_is_drained_are_made_elsewhere_at_once() -> None:
    """Its disk does not come back in a moment, as that of a process that ends does."""
    up = Nodes("a", "b", "c").start("a", "b")
    assert not up.tick()
    up.pool.set_duty(SetDuty(node=A, duty=Duty.DRAINING), up.now, WALL_NS)
    assert targets(up.tick()) == ["c"]
