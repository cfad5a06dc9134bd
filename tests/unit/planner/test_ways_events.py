"""What an event says of who runs a model that fits no device, and what nodes are told."""

import msgspec
import pytest

from services.planner.core import commands
from shared.ids import NodeId
from shared.layout import room_of
from shared.messages.pool import (
    DecodeShape,
    Holding,
    ModelRecord,
    NodeInfo,
    NodeJoined,
    NodeStatus,
    Profile,
    Reserved,
    Source,
    Sources,
    Tier,
)
from shared.parts import Part
from shared.step_costs import StepCosts
from tests.unit.planner.driver import EVERY, Driver, info
from tests.unit.planner.scripted import MODEL, NAME, record

BLOCK = 4096
FIRST, LAST = Part(0, 2), Part(2, 4)
TWICE = (StepCosts(1, 1e6, 0.0, 0.0), StepCosts(2, 2e6, 0.0, 0.0, devices=2))
NO_FASTER = (StepCosts(1, 1e6, 0.0, 0.0), StepCosts(2, 1e6, 0.0, 0.0, devices=2))


def large() -> ModelRecord:
    shape = DecodeShape(layers=2, heads=2, itemsize=2, looked_up=0)
    return msgspec.structs.replace(
        record(min_instances=1), block_bytes=(BLOCK,) * 4, nbytes=4 * BLOCK, shape=shape
    )


def device(name: str, host: str) -> NodeInfo:
    return msgspec.structs.replace(info(name), host=host, arena_bytes=2 * room_of(BLOCK))


def begun(costs: tuple[StepCosts, ...], host_of_b: str = "m") -> Driver:
    """An event that brings the model to devices a and b. All have it on disk."""
    d = Driver()
    infos = device("a", "m"), device("b", host_of_b)
    for each in infos:
        d.feed(NodeJoined(info=each))
    for i, each in enumerate(infos):
        d.feed(
            NodeStatus(
                node=each.node,
                generation=each.generation,
                seq=100 + i,
                arena_free=each.arena_bytes,
                holdings=(Holding(MODEL, Tier.DISK, EVERY),),
                profile=Profile(load_bytes_per_s=1e9, steps=costs),
            )
        )
    d.publish(large())
    d.load(queued=8)
    d.wait(1.0)
    d.answer(d.asked(commands.Reserve), Reserved(targets=infos))
    found = tuple(Source(each, Tier.DISK, EVERY, True) for each in infos)
    d.answer(d.asked(commands.FindSources), Sources(sources=found))
    d.think()
    return d


def told(d: Driver) -> dict[NodeId, tuple[Part | None, int]]:
    messages = [plan.message for plan in d.orders()]
    return {message.node: (message.part, message.devices) for message in messages}


def test_devices_of_a_machine_are_told_to_run_each_part_together() -> None:
    d = begun(TWICE)
    assert told(d) == {"a": (FIRST, 2), "b": (LAST, 2)}
    assert d.event.together
    assert d.event.way.startswith("2 devices of m together: a token is expected to take 18 ms by")
    assert d.event.way.endswith("9.79 ms by 2 devices of m together")


@pytest.mark.parametrize("costs", [NO_FASTER, ()])
def test_stages_run_one_after_the_other_where_that_is_no_slower(
    costs: tuple[StepCosts, ...],
) -> None:
    d = begun(costs)
    assert told(d) == {"a": (FIRST, 1), "b": (LAST, 1)}
    assert not d.event.together
    assert bool(d.event.way) == bool(costs)


def test_devices_of_two_machines_run_their_own_parts() -> None:
    d = begun(TWICE, host_of_b="other")
    assert told(d) == {"a": (FIRST, 1), "b": (LAST, 1)}
    assert not d.event.together


def test_the_reason_is_among_the_decisions_about_the_model() -> None:
    d = begun(TWICE)
    decisions = d.core.decisions(NAME, 10)
    assert any("together: a token is expected" in each.why for each in decisions)
