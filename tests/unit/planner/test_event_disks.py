"""Events whose blocks come from disks, and what becomes of them when a disk is lost."""

from dataclasses import replace

import msgspec

from services.planner.core import commands
from shared.ids import Generation, NodeId
from shared.messages import Ok
from shared.messages.pool import Holding, NodeInfo, NodeJoined, Reserved, Source, Sources, Tier
from shared.messages.scaling import EventState, PullFailed
from tests.unit.planner.driver import EVERY, Driver, info, settings
from tests.unit.planner.scripted import MODEL

DISK = Holding(MODEL, Tier.DISK, EVERY)


def machine(node: str) -> NodeInfo:
    return msgspec.structs.replace(info(node), host=node)


def begun(*targets: str, free: str = "", rate: int = 10_000) -> Driver:
    """An event to `targets` over links of this rate; a and b are machines that have the model on
    their disks, and no room but those named in `free`."""
    driver = Driver(replace(settings(), link_bytes_per_s=rate, step_overhead_s=0.0))
    for node in "abc":
        driver.feed(NodeJoined(info=machine(node)))
    driver.publish()
    for node in "ab":
        driver.status(node, DISK, free=500 if node in free else 0)
    driver.status("c")
    driver.load(queued=2)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=tuple(map(machine, targets))))
    sources = tuple(Source(machine(node), Tier.DISK, EVERY, complete=True) for node in "ab")
    driver.answer(driver.asked(commands.FindSources), Sources(sources=sources))
    driver.think()
    return driver


def plan(driver: Driver) -> commands.SendPlan:
    while not (asked := driver.all_asked(commands.SendPlan)):
        assert driver.think(), "nothing is left to plan"
    (plan,) = asked
    return plan


def pulls(asked: commands.SendPlan) -> dict[int, str]:
    return {pull.block: pull.source for pull in asked.message.pulls}


def test_full_nodes_feed_an_empty_one_from_their_disks() -> None:
    driver = begun("c")
    asked = plan(driver)
    assert set(pulls(asked)) == set(EVERY)
    assert set(pulls(asked).values()) <= {"a", "b"}
    assert not asked.message.promote
    assert driver.event.sources == ("a", "b")
    driver.answer(asked, Ok())
    driver.holds("c")
    assert driver.event.state is EventState.COMPLETE


def test_what_a_lost_disk_was_to_send_comes_from_the_other() -> None:
    driver = begun("c")
    asked = plan(driver)
    driver.answer(asked, Ok())
    lost = asked.message.pulls[0].source
    (left,) = {"a", "b"} - {lost}
    driver.holds("c", (1,))
    driver.gone(lost)
    again = plan(driver)
    assert again.message.revision == 1
    assert pulls(again) == dict.fromkeys((0, 2, 3), left)


def test_what_a_lost_disk_was_to_send_is_loaded_from_the_own() -> None:
    """Where the network is faster, two disks read a half each."""
    driver = begun("b", free="b", rate=10**12)
    asked = plan(driver)
    assert set(asked.message.promote) == {0, 2}
    assert pulls(asked) == {1: "a", 3: "a"}
    driver.answer(asked, Ok())
    driver.gone("a")
    again = plan(driver)
    assert set(again.message.promote) == set(EVERY)
    assert not again.message.pulls


def test_a_block_that_the_own_disk_cannot_give_comes_from_another_disk() -> None:
    driver = begun("b", free="b")
    asked = plan(driver)
    assert asked.message.promote
    driver.answer(asked, Ok())
    broken = asked.message.promote[0]
    driver.feed(
        PullFailed(
            event=driver.event.id,
            revision=0,
            node=NodeId("b"),
            generation=Generation(1),
            block=broken,
            source=NodeId("b"),
            code="model_error",
            message="cannot be read",
        )
    )
    driver.ping(there=True)
    again = plan(driver)
    assert pulls(again)[broken] == "a"
    assert set(again.message.promote) == set(asked.message.promote) - {broken}
