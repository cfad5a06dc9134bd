"""When a node reports the blocks that have come to it."""

from math import inf

from services.node.core.gathering import Gathering
from shared.ids import EventId, Generation, ModelId, NodeId
from shared.messages.scaling import BlockArrived


def arrived(block: int) -> BlockArrived:
    return BlockArrived(
        event=EventId("ev"), revision=0, node=NodeId("a"), generation=Generation(1),
        model_id=ModelId("m"), block=block, source=NodeId("b"), transport="tcp", nbytes=1,
        started_ns=0, first_byte_ns=0, finished_ns=0, ready_ns=0,
    )  # fmt: skip


def add(gathering: Gathering, at: float, *blocks: int) -> list[int]:
    for block in blocks:
        gathering.add(arrived(block))
    return [each.block for each in gathering.take(at)]


def test_the_first_block_is_reported_at_once_and_others_together() -> None:
    gathering = Gathering(0.5, range(6))
    assert add(gathering, 10.0, 0) == [0]
    assert gathering.due == inf
    assert add(gathering, 10.1, 1) == []
    assert add(gathering, 10.2, 2) == []
    assert gathering.due == 10.5
    assert add(gathering, 10.5) == [1, 2]
    assert add(gathering, 10.6, 3) == []
    assert not gathering.done


def test_a_block_that_comes_long_after_the_last_report_does_not_wait() -> None:
    gathering = Gathering(0.5, range(6))
    assert add(gathering, 10.0, 0) == [0]
    assert add(gathering, 11.0, 1) == [1]


def test_the_last_block_is_reported_at_once() -> None:
    gathering = Gathering(0.5, range(3))
    assert add(gathering, 10.0, 0) == [0]
    assert add(gathering, 10.1, 1) == []
    assert add(gathering, 10.2, 2) == [1, 2]
    assert gathering.done


def test_without_a_pace_each_block_is_reported_at_once() -> None:
    gathering = Gathering(0.0, range(3))
    assert [add(gathering, 10.0, block) for block in range(3)] == [[0], [1], [2]]


def test_what_waits_can_be_reported_early_and_the_next_waits_from_then_on() -> None:
    gathering = Gathering(0.5, range(6))
    assert add(gathering, 10.0, 0) == [0]
    assert gathering.take(10.1, early=True) == ()
    assert add(gathering, 10.2, 1) == []
    assert [each.block for each in gathering.take(10.3, early=True)] == [1]
    assert add(gathering, 10.4, 2) == []
    assert gathering.due == 10.8
