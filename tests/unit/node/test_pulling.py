"""Which reads a model's pulls make: a read costs as much as many chunks do."""

import pytest

from services.node.core.pulling import BLOCK_WINDOW, Pulls, Read
from services.node.core.residency import PlanId
from shared.ids import EventId, NodeId
from shared.messages.scaling import Pull

SOURCE = NodeId("s")
MOST = 16


@pytest.mark.parametrize(("blocks", "chunks"), [(32, 8), (32, 9), (1, 400), (5, 24), (100, 1)])
def test_reads_are_not_cut_up_as_the_window_moves(blocks: int, chunks: int) -> None:
    pulls = Pulls([chunks] * blocks, MOST)
    plan = [Pull(block, block, SOURCE) for block in range(blocks)]
    waiting = pulls.apply(PlanId(EventId("ev"), 1), plan, {SOURCE: "mem://s"})
    reads = 0
    while waiting:
        command = waiting.pop(0)
        if isinstance(command, Read):
            reads += 1
            waiting += pulls.read(command.pulling, command.run)
    assert all(block.complete for block in pulls.blocks)
    first = 8  # of few chunks, as long as the source has said nothing, and what is left of these
    assert reads <= first + blocks * -(-chunks // (BLOCK_WINDOW // 2))
