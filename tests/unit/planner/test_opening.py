"""A replica opens before its last blocks are there, if nobody else could serve the model."""

from collections.abc import Sequence

import pytest

from services.planner.core import commands
from services.planner.core.fleet import OPENING_S
from shared.errors import CapacityExceeded
from shared.messages import Ok
from shared.messages.pool import Holding, NodeView, PoolState, Reserved, Source, Sources, Tier
from shared.messages.scaling import EventRecord
from tests.unit.planner.driver import EVERY, Driver, info
from tests.unit.planner.scripted import BLOCK_BYTES, BLOCKS, MODEL, NAME, record

SETTLED_S = 0.05
"""By then gateways have been told."""


def loading(*nodes: str, copy_s: float, had: Sequence[int] = ()) -> tuple[Driver, EventRecord]:
    """Each of these nodes loads the model from its own disk, in this time, since requests came.
    `had`: the blocks that they held before."""
    driver = Driver()
    driver.join(*nodes)
    driver.publish()
    rate = BLOCKS * BLOCK_BYTES / copy_s
    for node in nodes:
        held = [Holding(MODEL, Tier.GPU, tuple(had))] if had else []
        on_disk = Holding(MODEL, Tier.DISK, EVERY)
        driver.status(node, *held, on_disk, load_bytes_per_s=rate)
    driver.load(queued=8 if len(nodes) > 1 else 1)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=tuple(map(info, nodes))))
    sources = tuple(Source(info(node), Tier.DISK, EVERY, complete=True) for node in nodes)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=sources))
    driver.think()
    for plan in driver.orders():
        driver.answer(plan, Ok())
    return driver, driver.event


def opened(driver: Driver) -> dict[str, bool]:
    """The instances that gateways know of, and which of them are opening."""
    driver.think()
    driver.wait(SETTLED_S)
    (found,) = driver.core.sets()
    return {instance.id: instance.opening for instance in found.instances}


def test_it_opens_shortly_before_its_last_block_and_stays_the_same_instance() -> None:
    driver, event = loading("a", copy_s=4.0)
    driver.wait(1.0)
    driver.arrived("a", 0, "a", event)
    assert opened(driver) == {}
    driver.wait(1.0)
    driver.arrived_together("a", {1: 0.0, 2: 0.0}, event)
    assert opened(driver) == {}, "two seconds for three blocks: the last one is more than 0.5 s off"
    driver, event = loading("a", copy_s=4 * OPENING_S)
    for block in (0, 1, 2):
        driver.wait(OPENING_S - SETTLED_S)
        driver.arrived("a", block, "a", event)
        assert opened(driver) == ({"replica-a": True} if block == 2 else {})
    driver.wait(5.0)
    assert opened(driver) == {"replica-a": True}, "its last block is late"
    driver.arrived("a", 3, "a", event)
    assert opened(driver) == {"replica-a": False}


def test_what_it_held_before_says_nothing_about_how_fast_blocks_come() -> None:
    driver, event = loading("a", copy_s=0.1, had=EVERY[:2])
    assert opened(driver) == {}
    driver.wait(2 * OPENING_S)
    driver.arrived("a", 2, "a", event)
    assert opened(driver) == {}, "one block took longer than that"


def test_it_does_not_open_without_the_first_block() -> None:
    driver, event = loading("a", copy_s=0.1)
    driver.arrived("a", 1, "a", event)
    assert opened(driver) == {}
    driver.arrived("a", 0, "a", event)
    assert opened(driver) == {"replica-a": True}


def waking(*nodes: str, tier: Tier = Tier.HOST) -> Driver:
    """Each of these nodes has a copy in its memory, and requests have come. They were sent orders,
    and have not answered."""
    driver = Driver()
    driver.join(*nodes)
    driver.publish()
    for node in nodes:
        driver.holds(node, tier=tier)
    driver.load(queued=8 if len(nodes) > 1 else 1)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=tuple(map(info, nodes))))
    sources = tuple(Source(info(node), tier, EVERY, complete=True) for node in nodes)
    driver.answer(driver.asked(commands.FindSources), Sources(sources=sources))
    driver.think()
    return driver


def opens(command: commands.Command) -> bool:
    """Whether it tells gateways of an opening replica."""
    said = command.message if isinstance(command, commands.Publish) else None
    return any(i.opening for i in getattr(said, "instances", ()))


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.CACHE])
def test_a_copy_in_memory_opens_with_its_order_and_after_it(tier: Tier) -> None:
    """The order is sent first, so that the node knows of it before requests come."""
    driver = waking("a", tier=tier)
    assert opened(driver) == {"replica-a": True}
    order = driver.asked(commands.SendPlan)
    tell = next(each for each in driver.said if opens(each))
    assert driver.said.index(order) < driver.said.index(tell)
    driver.answer(order, Ok())
    driver.arrived_together("a", dict.fromkeys(EVERY, 0.0), driver.event)
    assert opened(driver) == {"replica-a": False}


def test_it_closes_if_its_node_does_not_take_the_order() -> None:
    driver = waking("a")
    driver.answer(driver.asked(commands.SendPlan), CapacityExceeded("no room"))
    assert opened(driver) == {}


def test_it_stays_open_under_another_planner() -> None:
    driver = waking("a")
    driver.answer(driver.asked(commands.SendPlan), Ok())
    driver.replace_planner()
    holdings = (Holding(MODEL, Tier.HOST, EVERY),)
    event = driver.event.id
    node = NodeView(info=info("a"), holdings=holdings, arena_free=0, reserved_by=event, seq=1)
    pool = PoolState(nodes=(node,), models=(record(),))
    driver.answer(driver.asked(commands.ReadPool), pool)
    driver.holds("a", tier=Tier.HOST)
    assert opened(driver) == {"replica-a": True}


def test_until_it_is_complete_its_capacity_counts_as_coming_only() -> None:
    driver = waking("a")
    assert opened(driver) == {"replica-a": True}
    (instance,) = driver.core.sets()[0].instances
    assert instance.capacity > 0
    model = driver.core._machines.named[NAME]
    supply = model._replicas.sizing._supply(model.record, 1, model.fleet, None)
    assert (supply.now, supply.coming) == (0.0, 1)


def test_copies_that_wake_together_do_not_open() -> None:
    assert opened(waking("a", "b")) == {}


def test_it_does_not_open_beside_another_member() -> None:
    driver, event = loading("a", "b", copy_s=0.1)
    driver.arrived("a", 0, "a", event)
    assert opened(driver) == {}
    driver.arrived("b", 0, "b", event)
    assert opened(driver) == {}


def test_an_opening_replica_is_gone_with_its_node() -> None:
    driver, event = loading("a", copy_s=0.1)
    driver.arrived("a", 0, "a", event)
    assert opened(driver) == {"replica-a": True}
    driver.gone("a")
    assert opened(driver) == {}


def test_it_stays_open_when_others_begin_to_load() -> None:
    driver, event = loading("a", copy_s=0.1)
    driver.arrived("a", 0, "a", event)
    assert opened(driver) == {"replica-a": True}
    driver.join("b")
    driver.status("b", Holding(MODEL, Tier.DISK, EVERY), load_bytes_per_s=1.0)
    driver.load(queued=20, a=1)
    driver.wait(0.2)
    driver.answer(driver.asked(commands.Reserve), Reserved(targets=(info("b"),)))
    for question in driver.all_asked(commands.FindSources):
        source = Source(info("b"), Tier.DISK, EVERY, complete=True)
        driver.answer(question, Sources(sources=(source,)))
    driver.think()
    for plan in driver.orders():
        driver.answer(plan, Ok())
    driver.arrived("b", 0, "b", driver.event)
    assert opened(driver) == {"replica-a": True}
    for block in (1, 2, 3):
        driver.arrived("a", block, "a", event)
    assert opened(driver)["replica-a"] is False
