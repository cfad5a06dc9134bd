"""Work, prompts and slots as they are counted, and the load that is reported."""

from services.gateway.core.routes import AHEAD_S, PROMPTS_AHEAD
from shared.ids import ModelId, RequestId
from shared.messages.instances import InstanceState
from shared.slots import OVERFULL
from tests.unit.gateway.dispatch.builders import MODEL, Driver, sent
from tests.unit.gateway.support import path, replica


def test_work_is_counted_as_it_shrinks() -> None:
    driver = Driver(replica(1, slots=1))
    driver.admit("a", "b", prompt=10, max_tokens=5)
    (load,) = driver.dispatch.loads(0)
    assert (load.running_tokens, load.queued_tokens) == (15, 15)
    driver.give("a", 1, 0)
    assert driver.dispatch.loads(0)[0].running_tokens == 4
    driver.give("a", 1, 1)
    assert driver.dispatch.loads(0)[0].running_tokens == 3
    driver.dispatch.cancel(RequestId("a"), driver.now)
    (load,) = driver.dispatch.loads(0)
    assert (load.running_tokens, load.queued_requests) == (15, 0)


def test_prompts_wait_here_for_whoever_can_prefill_them_first() -> None:
    first, second = replica(1), replica(2)
    driver = Driver(first)
    half = PROMPTS_AHEAD // 2 + 1
    assert [r for r, *_ in sent(driver.admit("a", "b", "c", "d", prompt=half))] == ["a", "b"]
    assert sent(driver.publish(first, second)) == [("c", second.id, 1), ("d", second.id, 1)]


def test_slow_nodes_get_fewer_prompts_ahead() -> None:
    """What keeps a node busy is a time; a path's prompts count by the share of the model."""
    step_s, prompt = AHEAD_S / 150, 100
    driver = Driver()
    driver.publish(replica(1), step_s=step_s)
    assert len(sent(driver.admit(*"abcdef", prompt=prompt))) == 2
    assert len(sent(driver.publish(replica(1), step_s=step_s / 2))) == 1, "it is faster after all"
    assert len(sent(driver.publish(replica(1), path(2, 3), step_s=step_s / 2))) == 3


def test_no_instance_gets_more_prompts_because_others_could_take_some() -> None:
    driver = Driver(replica(1), replica(2, slots=1))
    assert len(sent(driver.admit("a", "b"))) == 2
    first = sent(driver.admit("c", "d", "e", prompt=PROMPTS_AHEAD // 2 + 1))
    assert [r for r, *_ in first] == ["c", "d"], "room for e is only where no slot is"


def test_a_first_token_makes_room_for_the_next_prompt() -> None:
    driver = Driver(replica(1))
    assert len(sent(driver.admit("a", "b", prompt=PROMPTS_AHEAD + 1))) == 1, "one in any case"
    assert [r for r, *_ in sent(driver.give("a", 1, 0))] == ["b"]


def test_prompts_before_a_path_that_is_no_longer_used_count_on_its_nodes() -> None:
    driver = Driver(path(1, 2))
    assert len(sent(driver.admit("a", prompt=3 * PROMPTS_AHEAD))) == 1
    drains = path(1, 2, state=InstanceState.DRAINING)
    driver.publish(drains, replica(1))
    assert sent(driver.admit("b")) == []
    assert sent(driver.publish(drains, replica(1), replica(3))) == [("b", "replica-3", 1)]
    assert sent(driver.admit("c", "d"))[0][1] == "replica-3"
    driver.give("a", 1, 0)
    driver.epoch += 1  # another planner: replica 3 has not failed
    driver.publish(drains, replica(1))
    assert [i for _, i, _ in sent(driver.admit("e"))] == ["replica-1"]


def test_the_first_node_of_a_pair_works_ahead() -> None:
    step = PROMPTS_AHEAD // 2
    driver = Driver(path(1, 2))
    assert len(sent(driver.admit(*"abcdefgh", prompt=step))) == 4
    longer = Driver(path(1, 2, 3))
    assert len(sent(longer.admit(*"abcdefgh", prompt=step))) == 1, "they would only wait there"


def test_paths_over_a_node_share_its_slots() -> None:
    """Those that drain as well; half a slot a sequence, in every second pass."""
    driver = Driver()
    most = round(OVERFULL * 2 * 4)
    driver.publish(path(1, 2, slots=100), node_slots=2)
    assert len(sent(driver.admit("a", max_tokens=10))) == 1
    names = [str(i) for i in range(most + 3)]
    for name in names:
        driver.admit(name)
    assert driver.dispatch.loads(0)[0].running_requests == most
    drains = path(1, 2, state=InstanceState.DRAINING, slots=100)
    assert sent(driver.publish(drains, path(1, 3, slots=100), node_slots=2)) == []
    (moved,) = sent(driver.give("a", 1, 0, "stop"))
    assert moved[1] == "path-1-3"


def test_load_presses_when_requests_begin_to_wait_and_when_an_instance_is_full_of_them() -> None:
    driver = Driver(replica(1, slots=2))
    pressing = driver.dispatch.pressing
    driver.admit("a", "b")
    assert not pressing(MODEL)
    driver.admit("c")
    assert pressing(MODEL)
    driver.dispatch.loads(0)
    driver.admit("d")
    assert not pressing(MODEL), "told, and less than an instance takes came since"
    driver.admit("e")
    assert pressing(MODEL)
    driver.dispatch.loads(0)
    for name in "ab":
        driver.give(name, 1, 0, "stop")
    assert not pressing(MODEL), "fewer wait"
    assert not pressing(ModelId("unknown"))


def test_the_load_says_since_when_the_oldest_request_waits() -> None:
    driver = Driver(replica(1, slots=1))
    assert driver.dispatch.loads(1000)[0].waiting_since_ns == 0
    driver.admit("runs")
    began = driver.now
    driver.now += 1.0
    driver.admit("waits")
    driver.now += 1.0
    driver.admit("waits too")
    (load,) = driver.dispatch.loads(1000)
    assert load.waiting_since_ns == 1000 + round((began + 1.0) * 1e9)
    for request in ("waits", "waits too"):
        driver.dispatch.cancel(RequestId(request), driver.now)
    (load,) = driver.dispatch.loads(1000)
    assert load.waiting_since_ns == 1000 + round(began * 1e9), "it has no token yet"
    driver.give("runs", 1, 0)
    assert driver.dispatch.loads(1000)[0].waiting_since_ns == 0
