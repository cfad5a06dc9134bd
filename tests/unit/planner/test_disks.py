"""Loads that keep a disk busy come one after the other."""

import math
from collections.abc import Mapping

import msgspec
import pytest

from services.planner.core import commands
from services.planner.core.disks import (
    BUSY,
    EARLY_S,
    Read,
    begins_in,
    disks_of,
    share_of_time,
    to_read,
)
from services.planner.core.event_base import READ_S
from services.planner.core.event_machine import EventMachine
from services.planner.core.links import Links
from services.planner.core.replicas import NO_ROOM_RETRY_S
from services.planner.core.rooms import KEPT_S, LOOK_S, PROMISE_S
from services.planner.core.tickets import Moment
from shared.ids import ModelId, NodeId
from shared.messages import Ok
from shared.messages.pool import (
    Holding,
    ModelRecord,
    NodeJoined,
    Profile,
    Reserved,
    Source,
    Sources,
    Tier,
)
from shared.messages.scaling import EventState
from tests.unit.planner.driver import EVERY, Driver, id_of, info, model

A, B = NodeId("a"), NodeId("b")


NOW, UNKNOWN = 0.0, math.inf


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([], NOW),
        ([Read({A: UNKNOWN}, 10, 0)], UNKNOWN),
        ([Read({A: 3.0}, 3, 0)], 3.0 - EARLY_S),
        ([Read({A: EARLY_S / 2}, 3, 0)], NOW),
        ([Read({A: 3.0}, 11, 0)], NOW),  # it is over later than the new one
        ([Read({A: 3.0}, 10, -1)], NOW),
        ([Read({A: 3.0}, 10, 1)], 3.0 - EARLY_S),
        ([Read({B: 3.0}, 10, 0)], NOW),
        ([Read({A: 3.0}, 10, 0, 0.4)], NOW),  # its target's link is slow
        ([Read({A: 3.0}, 10, 0, 0.4), Read({A: 2.0}, 10, 0, 0.4)], 5.0 - EARLY_S),
        ([Read({A: 3.0}, 10, 0), Read({A: 2.0}, 10, 0)], 5.0 - EARLY_S),
    ],
)
def test_a_load_waits_while_its_disk_is_busy(running: list[Read], expected: float) -> None:
    assert begins_in(Read({A: UNKNOWN}, 10, 0), running) == expected


def test_the_first_disk_that_is_free_is_enough() -> None:
    new = Read({A: UNKNOWN, B: UNKNOWN}, 10, 0)
    of_a = Read({A: 2.0}, 10, 0)
    assert begins_in(new, [of_a]) == NOW
    assert begins_in(new, [of_a, Read({B: 1.0}, 10, 0)]) == 1.0 - EARLY_S
    assert begins_in(new, [Read({A: 2.0, B: UNKNOWN}, 10, 0)]) == 2.0 - EARLY_S
    assert begins_in(new, [Read({A: 2.0}, 10, 0, 0.4), Read({B: 1.0}, 10, 0)]) == NOW
    assert begins_in(Read({}, 10, 0), [of_a]) == NOW
    assert Read({A: 2.0, B: 1.0}, 10, 0).free_in == 1.0 - EARLY_S
    assert Read({A: 2.0}, 10, 0, 0.4).free_in == NOW


def test_what_disks_have_to_read_for_all_loads() -> None:
    new = Read({}, 10, 0)
    reads = [Read({A: 2.0, B: UNKNOWN}, 10, 0), Read({A: 1.0}, 5, 1, 0.4)]
    assert to_read(new, reads, 0.5) == {A: 3.0, B: 0.0}
    larger, lower = Read({A: 50.0}, 99, 0), Read({A: 50.0, B: 0.2}, 10, -1)
    assert to_read(new, [larger], 0.5) == {A: 0.5}, "these share the disk"
    assert to_read(new, [lower], 0.5) == {A: 0.5, B: 0.2}


@pytest.mark.parametrize(
    ("should_be", "expected"),
    [(4.0, 3.0), (2.5, 2.5), (1.0, 2.0), (-1.0, 2.0)],  # blocks of a second: one may be on its way
)
def test_of_the_last_block_any_part_may_have_come(should_be: float, expected: float) -> None:
    known = Read({A: 3.0, B: UNKNOWN}, 10, 0, block_s={A: 1.0})
    assert known.expected({A: should_be, B: UNKNOWN}).left == {A: expected, B: UNKNOWN}


@pytest.mark.parametrize(
    ("disks", "targets", "link", "expected"),
    [
        ([A], [B], 100, 1.0),
        ([A], [B], 25, 0.5),
        ([A], [B], 0, 1.0),  # not known
        ([A], [A], 25, 1.0),  # its own disk
        ([], [B], 25, 1.0),
        ([B], [A], 100, pytest.approx(1e-7)),  # the disk was not measured
    ],
)
def test_a_slow_link_leaves_disks_idle(
    disks: list[NodeId], targets: list[NodeId], link: int, expected: float
) -> None:
    infos = {node: msgspec.structs.replace(info(node), link_bytes_per_s=link) for node in (A, B)}
    links = Links(infos, {A: Profile(load_bytes_per_s=50.0)}, 0, 0.0)
    assert share_of_time(links, disks, targets) == expected
    assert BUSY > 0.5


def test_the_nodes_of_a_machine_share_its_disk() -> None:
    one, two = (msgspec.structs.replace(info(node), host="h") for node in ("a", "b"))
    infos = {A: one, B: two, NodeId("c"): msgspec.structs.replace(info("c"), host="")}
    assert disks_of(infos, [A]) == disks_of(infos, [B]) == disks_of(infos, [A, B])
    assert len(disks_of(infos, [A, NodeId("c"), NodeId("gone")])) == 3


def on_disks(
    *models: ModelRecord,
    nodes: str = "a",
    disk_bytes_per_s: float = 100.0,
    free: int = 1000,
    checked: bool = True,
) -> Driver:
    """Four machines with room for two models each; the disks of some hold all models. Links carry
    10,000 bytes/s."""
    driver = Driver(checked=checked)
    for node in "abcd":
        driver.feed(NodeJoined(info=msgspec.structs.replace(info(node), host=node)))
        held = [Holding(each.model_id, Tier.DISK, EVERY) for each in models if node in nodes]
        driver.status(node, *held, free=free, load_bytes_per_s=disk_bytes_per_s)
    for each in models:
        driver.publish(each)
    return driver


def asked_for(driver: Driver) -> list[ModelId]:
    return [question.message.model_id for question in driver.all_asked(commands.Reserve)]


def load(driver: Driver, target: str, disk: str) -> None:
    """The only event that asks for a target gets this one, and a disk to read from."""
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info(target),)))
    found = Source(info(disk), Tier.DISK, EVERY, True)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=(found,)))
    driver.think()
    for plan in driver.orders():
        driver.answer(plan, Ok())


def all_read(driver: Driver, name: str) -> None:
    """The model's event has read all, and nobody was told so far."""
    event = driver.core._machines.by_id[id_of(name)].event
    assert event is not None
    event.read = lambda: None  # type: ignore[method-assign]


def test_others_have_their_turn_in_the_order_in_which_they_asked() -> None:
    driver = on_disks(*map(model, ("one", "two", "three")))
    driver.load(1, name="one", gateway="g1")
    driver.load(1, name="three", gateway="g3")
    driver.wait(0.1)
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver) == [id_of("one")]
    told = [transition.text for transition in driver.core.story(id_of("three"))]
    assert "waits for disks for 1 replica: others are being read from a" in told
    load(driver, "b", "a")
    assert asked_for(driver) == []
    driver.status("b", Holding(id_of("one"), Tier.GPU, EVERY), free=600)
    assert asked_for(driver) == [id_of("three")]
    load(driver, "c", "a")
    driver.status("c", Holding(id_of("three"), Tier.GPU, EVERY), free=600)
    assert asked_for(driver) == [id_of("two")]


def test_who_has_waited_goes_before_who_comes_when_the_disk_is_free() -> None:
    driver = on_disks(*map(model, ("one", "two", "three")))
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    driver.wait(0.01)
    all_read(driver, "one")
    driver.load(1, name="three", gateway="g3")
    assert asked_for(driver) == [id_of("two")]


def test_who_waits_asks_again_when_the_disk_should_be_free() -> None:
    size = sum(model("one").block_bytes)
    driver = on_disks(*map(model, ("one", "two")), disk_bytes_per_s=2.0 * size)
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    all_read(driver, "one")
    driver.wait(0.4)
    assert asked_for(driver) == []
    driver.wait(0.1 - EARLY_S / 2)
    assert asked_for(driver) == [id_of("two")]
    assert driver.core._desk.disks_at == math.inf


def test_while_a_load_stalls_who_waits_asks_now_and_then() -> None:
    size = sum(model("one").block_bytes)
    driver = on_disks(*map(model, ("one", "two")), disk_bytes_per_s=4.0 * size)
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    told = driver.wait(1.0)
    assert asked_for(driver) == []
    assert sum(isinstance(each, commands.WakeAt) for each in told) <= 1.0 / LOOK_S


def test_nobody_waits_for_who_wants_the_disk_no_longer() -> None:
    driver = on_disks(*map(model, ("one", "two", "three")))
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    driver.wait(0.01)
    driver.load(0, name="two", gateway="g2")
    all_read(driver, "one")
    driver.load(1, name="three", gateway="g3")
    assert asked_for(driver) == [id_of("three")]


def test_nobody_waits_for_who_waits_for_another_disk() -> None:
    driver = on_disks(*map(model, ("one", "two", "three")))
    for node, *names in (("a", "one", "two"), ("d", "three")):
        held = [Holding(id_of(name), Tier.DISK, EVERY) for name in names]
        driver.status(node, *held, free=1000, load_bytes_per_s=100.0)
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    driver.wait(0.01)
    driver.load(1, name="three", gateway="g3")
    assert asked_for(driver) == [id_of("three")]


def test_another_disk_is_another_turn() -> None:
    driver = on_disks(*map(model, ("one", "two", "three")), nodes="ad")
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    load(driver, "c", "d")
    driver.load(1, name="three", gateway="g3")
    assert asked_for(driver) == []


def test_a_copy_in_memory_needs_no_turn() -> None:
    driver = on_disks(*map(model, ("one", "two")))
    copies = [Holding(id_of("two"), tier, EVERY) for tier in (Tier.HOST, Tier.DISK)]
    driver.status("a", *copies, Holding(id_of("one"), Tier.DISK, EVERY), free=600)
    driver.load(1, name="one", gateway="g1")
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver) == [id_of("one"), id_of("two")]


def test_a_higher_priority_needs_no_turn() -> None:
    driver = on_disks(model("one"), msgspec.structs.replace(model("two"), priority=1))
    driver.load(1, name="one", gateway="g1")
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver) == [id_of("one"), id_of("two")]


def test_what_comes_from_memory_keeps_no_disk_busy() -> None:
    driver = on_disks(*map(model, ("one", "two")))
    driver.status("b", Holding(id_of("two"), Tier.HOST, EVERY), free=600)
    driver.load(1, name="two", gateway="g2")
    driver.load(1, name="one", gateway="g1")
    assert asked_for(driver) == [id_of("two"), id_of("one")]


def test_a_target_s_own_disk_is_busy_too() -> None:
    driver = on_disks(*map(model, ("one", "two")))
    driver.load(1, name="one", gateway="g1")
    load(driver, "a", "a")
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver) == []


@pytest.mark.parametrize(("disk", "slow"), [("a", False), ("d", True)])
def test_a_disk_that_is_read_for_two_loads_is_not_slow(disk: str, slow: bool) -> None:
    """The higher priority does not wait for its turn, so that both read at the same time."""
    size = sum(model("one").block_bytes)
    urgent = msgspec.structs.replace(model("two"), priority=1)
    driver = on_disks(model("one"), urgent, nodes="ad", disk_bytes_per_s=2.0 * size)
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.load(1, name="two", gateway="g2")
    load(driver, "c", disk)
    for _ in range(20):
        driver.wait(0.1)
        driver.load(1, name="one", gateway="g1")
    told = [transition.text for transition in driver.core.story(id_of("one"))]
    assert any("node a is slow" in text for text in told) == slow


def test_what_an_event_reads_is_looked_up_now_and_then() -> None:
    driver = on_disks(model("one"))
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    event = driver.core._machines.by_id[id_of("one")].event
    assert event is not None
    before = event.read()
    assert before is not None
    driver.status("b", Holding(id_of("one"), Tier.GPU, EVERY[:2]), free=600)
    assert event.read() == before
    driver.wait(READ_S)
    driver.load(1, name="one", gateway="g1")  # without news the core has no other time
    after = event.read()
    assert after is not None
    assert after.nbytes == before.nbytes // 2
    driver.status("b", Holding(id_of("one"), Tier.GPU, EVERY), free=600)
    assert event.read() is None


def test_it_is_looked_up_when_it_should_be_over() -> None:
    size = sum(model("one").block_bytes)
    driver = on_disks(model("one"), disk_bytes_per_s=4 * size / READ_S)
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    event = driver.core._machines.by_id[id_of("one")].event
    assert event is not None
    before = event.read()
    assert before is not None
    assert max(before.left.values()) < READ_S / 2
    driver.status("b", Holding(id_of("one"), Tier.GPU, EVERY[:2]), free=600)
    driver.wait(READ_S / 2)
    driver.load(1, name="one", gateway="g1")
    after = event.read()
    assert after is not None
    assert after.nbytes == before.nbytes // 2


def test_behind_slow_links_loads_come_beside_each_other() -> None:
    driver = on_disks(*map(model, ("one", "two")), disk_bytes_per_s=1e6)
    driver.load(1, name="one", gateway="g1")
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver) == [id_of("one")], "what it will take of the disk is not known yet"
    load(driver, "b", "a")
    assert asked_for(driver) == [id_of("two")]


def test_an_event_that_cannot_say_what_it_reads_keeps_no_other_from_disks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = on_disks(*map(model, ("one", "two")), checked=False)
    driver.load(1, name="one", gateway="g1")
    monkeypatch.setattr(EventMachine, "read", lambda event: 1 / 0)
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver)[-1] == id_of("two")
    assert (driver.events[-1].name, driver.events[-1].state) == ("one", EventState.FAILED)


def test_room_that_was_made_stays_promised_while_its_model_waits_for_disks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = on_disks(*map(model, ("one", "two", "asleep")), free=0)
    asleep = [Holding(id_of("asleep"), tier, EVERY) for tier in (Tier.HOST, Tier.DISK)]
    driver.status("b", *asleep, free=200)
    driver.load(1, name="one", gateway="g1")
    assert [r.message.model_id for r in driver.all_asked(commands.Release)] == [id_of("asleep")]
    rooms = driver.core._machines.rooms
    monkeypatch.setattr(driver.core._desk, "reads", lambda asker: [Read({A: UNKNOWN}, 1, 0)])
    for _ in range(int(2 * PROMISE_S)):
        driver.wait(1.0)
        driver.load(1, name="one", gateway="g1")
    assert rooms.must_leave(B, id_of("two"))


def room_for_one(*names: str) -> Driver:
    """Every node but b is full. On b a copy sleeps that may give way."""
    driver = on_disks(*map(model, (*names, "asleep")), free=0)
    asleep = [Holding(id_of("asleep"), tier, EVERY) for tier in (Tier.HOST, Tier.DISK)]
    driver.status("b", *asleep, free=200)
    return driver


def released(driver: Driver) -> list[ModelId]:
    return [question.message.model_id for question in driver.all_asked(commands.Release)]


def test_disks_are_kept_for_who_waits_for_room() -> None:
    driver = room_for_one("one", "two")
    driver.load(1, name="one", gateway="g1")
    assert released(driver) == [id_of("asleep")]
    driver.wait(0.01)
    driver.status("c", free=1000)
    driver.load(1, name="two", gateway="g2")
    assert asked_for(driver) == [id_of("one")], "it has room now, too, and is first"
    told = [transition.text for transition in driver.core.story(id_of("two"))]
    assert any(text.startswith("waits for disks") for text in told)


def test_they_are_not_kept_for_ever() -> None:
    driver = on_disks(*map(model, ("one", "two")))
    rooms, desk = driver.core._machines.rooms, driver.core._desk
    assert not rooms.disks_for(model("one"), (0, 0.0))
    assert rooms.disks_for(model("two"), (0, 1.0))
    assert desk.disks_at == desk.at + KEPT_S
    desk.now = Moment(desk.at + KEPT_S + 0.1, desk.now.wall_ns)
    assert not rooms.disks_for(model("two"), (0, 1.0))


def test_who_asks_again_does_not_keep_them_for_longer() -> None:
    driver = room_for_one("one", "two")
    rooms = driver.core._machines.rooms
    for _ in range(8):
        driver.load(1, name="one", gateway="g1")
        driver.load(1, name="two", gateway="g2")
        driver.wait(KEPT_S / 4)
    assert not rooms.disks_for(model("two"), (0, math.inf))


def larger(name: str, factor: int) -> ModelRecord:
    of = model(name)
    sizes = tuple(factor * nbytes for nbytes in of.block_bytes)
    return msgspec.structs.replace(of, block_bytes=sizes, nbytes=factor * of.nbytes)


def test_models_of_all_sizes_ask_and_the_planner_goes_on() -> None:
    """A smaller model does not wait for a larger one that has the disks, nor does it have a model
    asked that does."""
    first, second, third = larger("one", 2), larger("two", 3), model("three")
    driver = on_disks(first, second, third, model("asleep"), free=0)
    asleep = [Holding(id_of("asleep"), tier, EVERY) for tier in (Tier.HOST, Tier.DISK)]
    driver.status("b", *asleep, free=500)
    for name in ("one", "two", "three"):
        driver.load(1, name=name, gateway=f"g {name}")
        driver.wait(0.01)
    rooms = driver.core._machines.rooms
    assert set(rooms._for_disks) == {id_of("two")}
    assert rooms.waiting == {id_of(name) for name in ("one", "two", "three")}


def test_a_planner_whose_models_ask_for_ever_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = on_disks(model("one"), checked=False)
    machines, desk = driver.core._machines, driver.core._desk
    monkeypatch.setattr(machines, "tell_of_disks", lambda: setattr(desk, "disks_at", desk.at))
    desk.disks_at = desk.at
    said = driver.load(1, name="one", gateway="g1")
    logs = [command.text for command in said if isinstance(command, commands.Log)]
    assert logs == ["models ask for room for ever"]
    assert asked_for(driver) == [id_of("one")]
    assert desk.disks_at > desk.at


def test_an_event_whose_disks_are_gone_reads_nothing() -> None:
    driver = on_disks(*map(model, ("one", "two")))
    driver.load(1, name="two", gateway="g2")
    driver.gone("a")
    driver.load(1, name="one", gateway="g1")
    event = driver.core._machines.by_id[id_of("two")].event
    assert event is not None
    assert event.read() is None
    assert not driver.core._machines.broken


def test_they_are_not_kept_from_who_has_waited_for_longer() -> None:
    rooms = on_disks(*map(model, ("one", "two"))).core._machines.rooms
    assert not rooms.disks_for(model("one"), (0, 1.0))
    assert not rooms.disks_for(model("two"), (0, 0.0))


def test_they_are_not_kept_for_who_finds_no_room() -> None:
    rooms = on_disks(*map(model, ("one", "two")), free=0).core._machines.rooms
    assert not rooms.disks_for(model("one"), (0, 0.0))
    assert rooms.ask(id_of("one"), [1]).why_not
    assert not rooms.disks_for(model("two"), (0, 1.0))


def test_who_waits_is_asked_at_once_when_who_was_first_wants_nothing_more() -> None:
    driver = room_for_one("one", "two")
    driver.load(1, name="one", gateway="g1")
    driver.wait(0.01)
    driver.load(1, name="two", gateway="g2")
    driver.status("b", free=0)
    driver.load(0, name="one", gateway="g1")
    driver.wait(KEPT_S / 10)
    driver.status("c", free=1000)
    assert asked_for(driver) == [id_of("two")]


def test_they_are_not_kept_for_who_wants_none() -> None:
    driver = on_disks(*map(model, ("one", "two")))
    rooms, desk = driver.core._machines.rooms, driver.core._desk
    assert not rooms.disks_for(model("one"), (0, 0.0))
    assert rooms.disks_for(model("two"), (0, 1.0))
    desk.disks_at = math.inf
    rooms.wants_none(id_of("one"))
    assert desk.disks_at == desk.at, "who waits is told"
    assert not rooms.disks_for(model("two"), (0, 1.0))
    desk.disks_at = math.inf
    rooms.wants_none(id_of("one"))
    assert desk.disks_at == math.inf


def beside(driver: Driver, reserve_s: float) -> EventMachine:
    """An event of model two, which reads disks a and d. Disk a has two seconds to read for model
    one. The registry answers after `reserve_s`."""
    driver.load(1, name="one", gateway="g1")
    load(driver, "b", "a")
    driver.wait(2.0)
    driver.status("b", Holding(id_of("one"), Tier.GPU, EVERY[:2]), free=600)
    driver.load(1, name="two", gateway="g2")
    driver.wait(reserve_s)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("c"),)))
    found = tuple(Source(info(disk), Tier.DISK, EVERY, True) for disk in "ad")
    driver.answer(driver.asked(commands.FindSources), Sources(sources=found))
    assert driver.asked(commands.MakePlan).links.reading_s == {"a": pytest.approx(2.0, abs=0.01)}
    driver.think()
    event = driver.core._machines.by_id[id_of("two")].event
    assert event is not None
    return event


def left(driver: Driver, event: EventMachine, seconds: float) -> Mapping[str, float]:
    """What each disk is still to read for the event, once some seconds have passed."""
    driver.wait(seconds)
    driver.load(1, name="two", gateway="g2")  # without news the core has no other time
    read = event.read()
    assert read is not None
    return read.left


def test_what_a_load_reads_is_dealt_beside_what_others_still_read() -> None:
    driver = on_disks(*map(model, ("one", "two")), nodes="ad")
    event = beside(driver, reserve_s=0.0)
    read = event.read()
    assert read is not None
    assert read.left == {"a": 1.0, "d": 3.0}
    assert left(driver, event, 0.5) == {"a": 1.0, "d": pytest.approx(2.5)}, "a reads for one first"


def test_what_others_read_while_an_event_is_planned_is_over_sooner() -> None:
    driver = on_disks(*map(model, ("one", "two")), nodes="ad")
    event = beside(driver, reserve_s=1.0)
    assert left(driver, event, 1.5)["a"] == pytest.approx(0.5, abs=0.01)


def test_who_found_no_room_after_all_keeps_its_turn_and_soon_asks_again() -> None:
    driver = on_disks(*map(model, ("one", "two")), nodes="a")
    driver.load(1, name="one", gateway="g1")
    one = driver.core._machines.by_id[id_of("one")]
    since = one.event.record.wanted_ns if one.event is not None else 0
    driver.wait(0.01)
    driver.load(1, name="two", gateway="g2")
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=()))
    found = Source(info("a"), Tier.DISK, EVERY, True)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=(found,)))
    (failed,) = [event for event in driver.events if event.state is EventState.FAILED]
    assert (failed.name, failed.error) == ("one", "no node has room for another replica")
    assert asked_for(driver) == [id_of("two")], "the disk is free now"
    assert one.turn == (0, since)
    driver.wait(2 * NO_ROOM_RETRY_S)
    told = [transition.text for transition in driver.core.story(id_of("one"))]
    assert told[-1].startswith("waits for disks"), "it has asked again"
    assert one._replicas._failed == 0, "another failure is the first of its kind"
