"""What breaks an invariant is seen; what only looks so is not."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import msgspec
import pytest

from services.node.service import NodeService
from shared.ids import EventId, Generation, InstanceId, ModelId, ModelName, NodeId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.pool import Holding, NodeGone, NodeInfo, Tier
from shared.messages.scaling import EventState
from simulation import loop
from simulation.instance_sets import of_set
from simulation.invariants import LEARN_S, Events, Pool
from tests.unit.planner.records import event
from tests.unit.registry.builders import info

BLOCKS = 4
MODEL = ModelId("m")
A, B = NodeId("a"), NodeId("b")


def instance(
    name: str, *stages: tuple[str, int, int], capacity: float = 1.0,
    state: InstanceState = InstanceState.SERVING,
) -> Instance:  # fmt: skip
    return Instance(
        id=InstanceId(name),
        stages=tuple(Stage(NodeId(node), "", start, stop) for node, start, stop in stages),
        state=state,
        capacity=capacity,
        slots=1,
        event=None,
    )


def wrong(*instances: Instance) -> list[str]:
    made = InstanceSet(
        name=ModelName("n"), model_id=MODEL, epoch=0, revision=1, instances=instances
    )
    return of_set(made, BLOCKS)


HALF = ("a", 0, 2), ("b", 2, 4)


def test_a_node_that_is_counted_once_is_right() -> None:
    assert not wrong(instance("r", ("a", 0, 4), capacity=0.5), instance("p", *HALF, capacity=1.0))


def test_a_node_that_is_counted_twice() -> None:
    (found,) = wrong(instance("r", ("a", 0, 4)), instance("p", *HALF, capacity=0.5))
    assert "a is counted 1.25" in found


def test_what_takes_no_requests_is_not_counted() -> None:
    moving = instance("p", *HALF, capacity=2.0, state=InstanceState.MOVING)
    assert not wrong(instance("r", ("a", 0, 4)), moving)


@pytest.mark.parametrize("stages", [[("a", 0, 3)], [("a", 0, 2), ("b", 1, 4)], [("a", 1, 4)]])
def test_paths_run_every_block_once(stages: list[tuple[str, int, int]]) -> None:
    assert "does not run every block once" in wrong(instance("p", *stages, capacity=0.1))[0]


def test_a_node_is_one_events_target() -> None:
    events = Events()
    one = msgspec.structs.replace(event("one", EventState.TRANSFERRING), targets=(A, B))
    other = msgspec.structs.replace(one, id=EventId("other"), targets=(B,))
    assert events.changed(one) == []
    assert events.changed(other) == ["b is a target of one and of other"]
    events.changed(msgspec.structs.replace(one, state=EventState.FAILED))
    assert events.changed(other) == []


def test_who_came_back_may_be_anothers_target_until_the_event_plans_with_it() -> None:
    events = Events()
    one = msgspec.structs.replace(event("one", EventState.TRANSFERRING), targets=(A, B))
    events.changed(one)
    events.gone(B)
    other = msgspec.structs.replace(one, id=EventId("other"), targets=(B,))
    assert events.changed(other) == []
    assert events.changed(msgspec.structs.replace(one, state=EventState.SERVING)) == []
    assert events.changed(msgspec.structs.replace(one, revision=1))


@dataclass
class Node:
    """As much of a node as the pool looks at."""

    info: NodeInfo
    blocks: list[int] = field(default_factory=lambda: list(range(BLOCKS)))

    def holdings(self) -> tuple[Holding, ...]:
        return (Holding(MODEL, Tier.HOST, tuple(self.blocks)),)

    @property
    def service(self) -> NodeService:
        return cast(NodeService, self)


def test_the_last_copy_that_goes_without_a_crash() -> None:
    async def work() -> None:
        pool, a, b = Pool({MODEL: BLOCKS}, ample=True), Node(info("a")), Node(info("b"))
        nodes = {"a": a.service, "b": b.service}
        assert pool.look(nodes) == []
        a.blocks.clear()
        assert pool.look(nodes) == []
        b.blocks.pop()
        (found,) = pool.look(nodes)
        assert "the last: b" in found
        assert pool.look(nodes) == [], "it is said once"

    loop.run(work())


@pytest.mark.parametrize(("after", "excused"), [(LEARN_S - 0.1, True), (LEARN_S + 0.1, False)])
def test_what_is_decided_before_a_crash_is_known_is_the_crashs_fault(
    after: float, excused: bool
) -> None:
    async def work() -> None:
        pool, a, b = Pool({MODEL: BLOCKS}, ample=True), Node(info("a")), Node(info("b"))
        pool.look({"a": a.service, "b": b.service})
        pool.crashed(a.service)
        await asyncio.sleep(60)
        pool.gone(NodeGone(node=A, generation=Generation(1), reason=""))
        await asyncio.sleep(after)
        b.blocks.clear()
        assert (pool.look({"b": b.service}) == []) is excused

    loop.run(work())


def test_a_crash_may_take_the_last_copy() -> None:
    async def work() -> None:
        pool, a = Pool({MODEL: BLOCKS}, ample=True), Node(info("a"))
        pool.look({"a": a.service})
        pool.crashed(a.service)
        assert pool.look({}) == []
        assert pool.kept == []

    loop.run(work())
