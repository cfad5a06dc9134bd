"""What gives way when a model finds no memory, and for whom the room is that it leaves."""

import msgspec

from services.planner.core import commands
from services.planner.core.arbiter import TURN_S
from services.planner.core.rooms import PROMISE_S
from services.planner.core.usage import PATIENCE_S
from shared.errors import CapacityExceeded
from shared.ids import ModelId, NodeId
from shared.messages import Ok
from shared.messages.pool import Holding, ModelRecord, Reserved, Source, Sources, Tier
from shared.messages.scaling import EventState
from tests.unit.planner.driver import EVERY, Driver, id_of, info, model
from tests.unit.planner.records import arrival

A = NodeId("a")
FULL = 1000 - 400


def copy(name: str, tier: Tier) -> Holding:
    return Holding(id_of(name), tier, EVERY)


def pool(*models: ModelRecord, disk: bool = True) -> Driver:
    """Node a has 400 bytes left of 1000: two copies of models fit, and one is there."""
    driver = Driver()
    driver.join("a")
    driver.status("a", *(copy(m.name, Tier.DISK) for m in models if disk), free=FULL)
    for each in models:
        driver.publish(each)
    return driver


def holds(driver: Driver, *held: Holding, free: int = 200, disk: tuple[str, ...] = ()) -> None:
    driver.status("a", *held, *(copy(name, Tier.DISK) for name in disk), free=free)


def released(driver: Driver) -> list[tuple[ModelId, Tier | None]]:
    return [(r.message.model_id, r.message.keep) for r in driver.all_asked(commands.Release)]


DISK = ("one", "two", "three")


def sleeping() -> Driver:
    driver = pool(*(model(name) for name in DISK))
    holds(driver, copy("one", Tier.HOST), copy("two", Tier.HOST), disk=DISK)
    return driver


def test_a_sleeping_copy_gives_way_to_a_model_that_is_asked_for() -> None:
    driver = sleeping()
    driver.load(1, name="three")
    assert not driver.all_asked(commands.Reserve)
    ((gone, keep),) = released(driver)
    assert keep is None
    driver.answer(driver.asked(commands.Release), Ok())
    stays = "two" if gone == id_of("one") else "one"
    holds(driver, copy(stays, Tier.HOST), free=600, disk=DISK)
    assert driver.asked(commands.Reserve).message.model_id == id_of("three")


def test_the_copy_goes_whose_model_is_asked_for_least() -> None:
    driver = sleeping()
    for _ in range(3):
        driver.load(0, name="one", a=1)
        driver.wait(1.0)
    driver.load(0, name="one")
    driver.load(1, name="three")
    assert released(driver) == [(id_of("two"), None)]


def used_more_than_two(driver: Driver) -> None:
    """Model one is used three times, and two once. Links are much faster than disks here."""
    for name in ("one", "one", "two", "one"):
        driver.load(0, name=name, a=1)
        driver.wait(1.0)
        driver.load(0, name=name)


SLOW_DISK = 100.0


def test_a_copy_goes_that_is_in_memory_elsewhere_too() -> None:
    driver = sleeping()
    driver.join("b")
    there = copy("one", Tier.HOST), copy("two", Tier.HOST), *(copy(n, Tier.DISK) for n in DISK)
    driver.status("a", *there, free=200, load_bytes_per_s=SLOW_DISK)
    driver.status("b", copy("one", Tier.HOST), free=0)
    used_more_than_two(driver)
    driver.load(1, name="three")
    assert released(driver) == [(id_of("one"), None)]


def test_a_copy_goes_that_a_host_cache_has_too() -> None:
    driver = sleeping()
    there = copy("one", Tier.HOST), copy("two", Tier.HOST), *(copy(n, Tier.DISK) for n in DISK)
    driver.status("a", *there, copy("one", Tier.CACHE), free=200, load_bytes_per_s=SLOW_DISK)
    used_more_than_two(driver)
    driver.load(1, name="three")
    assert [model for model, _ in released(driver)] == [id_of("one")]


def test_a_copy_that_is_on_no_disk_stays() -> None:
    driver = pool(*(model(name) for name in DISK), disk=False)
    holds(driver, copy("one", Tier.HOST), copy("two", Tier.HOST), disk=("three",))
    driver.load(1, name="three")
    assert not driver.open
    told = [transition.text for transition in driver.core.story(id_of("three"))]
    assert any("waits for memory for 1 replica:" in text for text in told)


def test_what_gave_way_says_for_whom_and_why() -> None:
    driver = sleeping()
    driver.load(1, name="three")
    ((gone, _),) = released(driver)
    told = [transition.text for transition in driver.core.story(gone)]
    assert any("three: sleeps; its loss is expected to cost" in text for text in told)


def test_room_that_was_made_for_a_model_is_not_given_to_another() -> None:
    driver = sleeping()
    driver.publish(model("four"))
    driver.load(1, name="three")
    release = driver.asked(commands.Release)
    driver.answer(release, Ok())
    driver.load(1, name="four", gateway="gateway-1")  # it asks before the memory is free
    assert not released(driver)
    stays = "two" if release.message.model_id == id_of("one") else "one"
    holds(driver, copy(stays, Tier.HOST), free=600, disk=DISK)
    assert [r.message.model_id for r in driver.all_asked(commands.Reserve)] == [id_of("three")]


def loads(driver: Driver, node: str) -> None:
    """The open event gets the node for its target, and loads from a's disk."""
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info(node),)))
    disk = Source(info("a"), Tier.DISK, EVERY, True)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=(disk,)))
    driver.think()
    driver.answer(driver.asked(commands.SendPlan), Ok())


def test_the_rest_of_a_nodes_memory_is_others_once_a_model_has_its_place_there() -> None:
    driver = sleeping()
    driver.publish(model("four"))
    driver.load(1, name="three")
    ((gone, _),) = released(driver)
    driver.answer(driver.asked(commands.Release), Ok())
    stays = "two" if gone == id_of("one") else "one"
    disk = (*DISK, "four")
    holds(driver, copy(stays, Tier.HOST), free=600, disk=disk)
    loads(driver, "a")
    holds(driver, copy(stays, Tier.HOST), copy("three", Tier.GPU), disk=disk)
    driver.wait(0.1)
    assert driver.replicas("three") == {"a"}
    driver.load(1, name="four", gateway="gateway-1")
    assert released(driver) == [(id_of(stays), None)]


def test_room_that_is_made_for_a_model_is_others_once_it_needs_no_more() -> None:
    driver = sleeping()
    driver.publish(model("four"))
    driver.load(1, name="three")
    ((gone, _),) = released(driver)
    driver.join("b")
    driver.status("b", free=500)  # it is free before the room is made
    loads(driver, "b")
    driver.load(1, name="four", gateway="gateway-1")
    driver.answer(driver.asked(commands.Release), Ok())
    stays = "two" if gone == id_of("one") else "one"
    holds(driver, copy(stays, Tier.HOST), free=600, disk=(*DISK, "four"))
    assert [r.message.model_id for r in driver.all_asked(commands.Reserve)] == [id_of("four")]


def test_room_that_a_model_no_longer_wants_goes_to_one_that_waits() -> None:
    driver = sleeping()
    driver.publish(model("four"))
    driver.load(1, name="three")
    ((gone, _),) = released(driver)
    driver.load(1, name="four", gateway="gateway-1")
    driver.answer(driver.asked(commands.Release), Ok())
    stays = "two" if gone == id_of("one") else "one"
    holds(driver, copy(stays, Tier.HOST), free=600, disk=(*DISK, "four"))
    refused = driver.asked(commands.Reserve)
    assert refused.message.model_id == id_of("three")
    driver.answer(refused, CapacityExceeded("no room"))
    driver.load(0, name="three")
    driver.wait(0.1)
    assert driver.asked(commands.Reserve).message.model_id == id_of("four")


def test_memory_that_a_load_took_is_free_for_nobody_before_its_node_says_so() -> None:
    driver = pool(*(model(name) for name in ("one", "two")))
    driver.status("a", copy("one", Tier.DISK), copy("two", Tier.DISK), free=500)
    driver.core._cluster.on_arrived(arrival(A, id_of("one"), 0), 0.0)
    driver.load(1, name="two")
    assert not driver.all_asked(commands.Reserve)
    holds(driver, copy("one", Tier.GPU), free=100, disk=("one", "two"))
    holds(driver, free=500, disk=("one", "two"))
    assert driver.asked(commands.Reserve).message.model_id == id_of("two")


def serving(low: int = 0, high: int = 0) -> Driver:
    """Models one and two serve requests on node a, and fill it."""
    records = [msgspec.structs.replace(model(name), priority=low) for name in ("one", "two")]
    driver = pool(*records, msgspec.structs.replace(model("three"), priority=high))
    driver.load(0, name="one", gateway="g1", a=1)
    driver.load(0, name="two", gateway="g2", a=2)
    holds(driver, copy("one", Tier.GPU), copy("two", Tier.GPU), disk=DISK)
    driver.wait(0.1)
    assert driver.replicas("one") == driver.replicas("two") == {"a"}
    return driver


def drained(driver: Driver) -> set[str]:
    return {
        each.name
        for each in driver.core.sets()
        for instance in each.instances
        if instance.state.value != "serving"
    }


def test_one_replica_of_a_lower_priority_goes_at_once_whatever_runs_over_it() -> None:
    driver = serving(high=1)
    driver.load(1, name="three", gateway="g3")
    ((gone, _),) = released(driver)
    assert [name for name in ("one", "two") if not driver.replicas(name)] == [
        name for name in ("one", "two") if id_of(name) == gone
    ]


def test_what_loads_gives_way_to_a_higher_priority_only_and_its_event_is_called_off() -> None:
    for high in (0, 1):
        others = [msgspec.structs.replace(model(n), priority=high) for n in ("two", "three")]
        driver = pool(model("one"), *others)
        driver.load(0, name="two", gateway="g2", a=1)
        holds(driver, copy("two", Tier.GPU), free=600, disk=DISK)
        driver.load(1, name="one", gateway="g1")
        driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("a"),)))
        disk = Source(info("a"), Tier.DISK, EVERY, True)
        driver.answer(driver.asked(commands.FindSources), Sources(sources=(disk,)))
        driver.think()
        driver.answer(driver.asked(commands.SendPlan), Ok())
        loading = Holding(id_of("one"), Tier.GPU, ())
        holds(driver, copy("two", Tier.GPU), loading, free=200, disk=DISK)
        driver.load(1, name="three", gateway="g3")
        assert [gone for gone, _ in released(driver)] == ([id_of("one")] if high else [])
        assert driver.event.state is (EventState.CANCELLED if high else EventState.TRANSFERRING)
        if high:
            assert {u.message.nodes for u in driver.all_asked(commands.Unreserve)} == {("a",), ()}


def test_a_lower_priority_waits_until_it_is_starved() -> None:
    driver = serving(low=1)
    for second in range(int(PATIENCE_S) + 2):
        assert second >= PATIENCE_S or drained(driver) == set()
        driver.load(0, name="one", gateway="g1", a=1)
        driver.load(0, name="two", gateway="g2", a=2)
        driver.load(9, name="three", gateway="g3")
        driver.wait(1.0)
    assert len(drained(driver)) == 1


def test_equals_take_turns() -> None:
    driver = serving()
    for second in range(15):
        driver.load(0, name="one", gateway="g1", a=1)
        driver.load(0, name="two", gateway="g2", a=2)
        driver.load(1, name="three", gateway="g3")
        driver.wait(1.0)
        if second < TURN_S - 1:
            assert drained(driver) == set()
    assert len(drained(driver)) == 1


def test_room_goes_to_the_model_that_has_waited_for_longest() -> None:
    """Not to the one that was published first."""
    driver = serving()
    driver.publish(model("four"))
    holds(driver, copy("one", Tier.GPU), copy("two", Tier.GPU), disk=(*DISK, "four"))
    for waiting in (("four",), ("four", "three"), ("four", "three")):
        for name in waiting:
            driver.load(1, name=name, gateway=name)
        driver.load(0, name="two", gateway="g2", a=2)
        driver.load(0, name="one", gateway="g1")
        driver.wait(0.5)
    told = [transition.text for transition in driver.core.story(id_of("four"))]
    assert any("one makes room for four" in text for text in told)


def test_a_model_keeps_what_it_gave_way_on_no_longer_than_its_requests_run() -> None:
    """More load for the model that gives way does not bring its draining replica back."""
    driver = serving()
    driver.wait(TURN_S)
    driver.load(0, name="one", gateway="g1", a=1)
    driver.load(0, name="two", gateway="g2", a=2)
    driver.load(1, name="three", gateway="g3")
    driver.wait(0.1)
    (gives_way,) = drained(driver)
    driver.load(5, name=gives_way, gateway="g4")
    driver.wait(0.2)
    assert drained(driver) == {gives_way}


def test_a_model_with_its_own_keep_alive_stays_for_so_long() -> None:
    driver = pool(*(msgspec.structs.replace(model("one"), keep_alive_s=5.0), model("two")))
    holds(driver, copy("one", Tier.GPU), copy("two", Tier.GPU), disk=DISK)
    served = {"one": 0.0, "two": 0.0}
    for _ in range(100):
        driver.load(0, name="one", gateway="g1")
        driver.load(0, name="two", gateway="g2")
        driver.wait(0.1)
        for name in served:
            served[name] += 0.1 * bool(driver.replicas(name))
    assert 1.9 < served["two"] < 2.5
    assert 4.9 < served["one"] < 5.5


def test_a_sleeping_copy_that_feeds_an_event_stays() -> None:
    driver = sleeping()
    driver.join("b")
    driver.status("b", free=500)
    driver.load(9, name="one")
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("b"),)))
    source = Source(info("a"), Tier.HOST, EVERY, True)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=(source,)))
    driver.think()
    driver.answer(driver.asked(commands.SendPlan), Ok())
    driver.load(1, name="three", gateway="gateway-1")
    assert released(driver) == [(id_of("two"), None)]


def test_gateways_hear_the_objective_while_no_replica_can_be_added() -> None:
    """Then they refuse at once what would miss it."""
    record = msgspec.structs.replace(model("one"), ttft_s=0.7)
    driver = pool(record)
    driver.load(0, name="one", a=1)
    holds(driver, copy("one", Tier.GPU), disk=("one",), free=600)
    driver.wait(1.1)
    assert driver.sets[-1].within_s == 0.7, "its only node has it"
    driver.join("b")
    driver.status("b", free=FULL)
    driver.wait(1.1)
    assert driver.sets[-1].within_s == 0.0, "there is another node now"


def about_to_use(*, reserved: bool) -> Driver:
    """Model one sleeps on node a, and an event has asked for node a; the more important model three
    then wants the room."""
    driver = pool(model("one"), msgspec.structs.replace(model("three"), priority=1))
    holds(driver, copy("one", Tier.HOST), disk=("one", "three"))
    driver.load(1, name="one", gateway="g1")
    if reserved:
        driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("a"),)))
    driver.wait(PROMISE_S)  # until then the room is the event's in any case
    driver.load(1, name="three", gateway="g3")
    return driver


def test_a_copy_on_a_node_that_is_set_aside_for_its_model_does_not_give_way() -> None:
    """Its node would be told to free the model, and then to load it."""
    assert not released(about_to_use(reserved=True))


def test_a_node_whose_copy_has_given_way_is_no_target() -> None:
    """The copy was free when the node was asked for. (`validate` looks after each step.)"""
    driver = about_to_use(reserved=False)
    assert released(driver) == [(id_of("one"), None)]
    driver.join("b")
    driver.answer(driver.all_asked(commands.Reserve)[0], Reserved(targets=(info("a"),)))
    disk = Source(info("b"), Tier.DISK, EVERY, True)
    driver.answer(driver.all_asked(commands.FindSources)[0], Sources(sources=(disk,)))
    assert not driver.all_asked(commands.MakePlan)
    first = next(record for record in driver.core.events(9) if record.name == "one")
    assert first.state is EventState.FAILED
