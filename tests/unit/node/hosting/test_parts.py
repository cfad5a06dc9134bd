"""A node that holds a part of a model, as one device of a group."""

from pathlib import Path

import pytest

from shared.errors import BadInput, CapacityExceeded
from shared.layout import PAGE
from shared.messages.pool import Holding, Tier
from shared.parts import Part
from tests.unit.node.cluster import Nodes, nodes
from tests.unit.node.hosting.test_inheritance import KeptHere

FIRST, LAST = Part(0, 3), Part(3, 6)


def arena(up: Nodes, name: str) -> list[Holding]:
    return [h for h in up.services[name].holdings() if h.tier in (Tier.GPU, Tier.HOST)]


async def test_two_nodes_without_room_for_the_model_run_it_together(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        tokens = await up.generate("a")
        sizes = (sum(up.record.block_bytes[p.start : p.stop]) for p in (FIRST, LAST))
        room = (max(sizes) // PAGE + 2) * PAGE
        assert room < up.record.nbytes
        for name, part in (("b", FIRST), ("c", LAST)):
            await up.start(name, arena_bytes=room)
            await up.apply(name, dict.fromkeys(part.blocks, "a"), part=part)
            await up.until_arrived(name, tuple(part.blocks))
            (held,) = arena(up, name)
            assert (held.blocks, held.part) == (tuple(part.blocks), part)
        assert await up.generate("b", "c", request="together") == tokens

        with pytest.raises(CapacityExceeded, match="room for blocks 0-2 of the model here, not"):
            await up.apply("b", {3: "a"}, part=LAST, event="ev-2")
        with pytest.raises(BadInput, match="no block 3"):
            await up.apply("b", {3: "a"}, part=FIRST, event="ev-2")
        with pytest.raises(BadInput, match="no block 3"):
            await up.apply("b", promote=(3,), part=FIRST, event="ev-2")

        await up.release("c", Tier.HOST)
        (held,) = arena(up, "c")
        assert (held.tier, held.blocks, held.part) == (Tier.HOST, tuple(LAST.blocks), LAST)
        await up.release("b")
        await up.nothing_leaked("b")


async def test_a_part_outlives_its_process(tmp_path: Path, checkpoint: Path) -> None:
    keeper = KeptHere()
    async with nodes(tmp_path, checkpoint, "b") as up:
        await up.promoted("b")
        await up.start("a", keeper=keeper)
        await up.apply("a", dict.fromkeys(LAST.blocks, "b"), part=LAST)
        await up.until_arrived("a", tuple(LAST.blocks))
        await up.stop("a")
        await up.start("a", keeper=keeper)
        (held,) = arena(up, "a")
        assert (held.tier, held.blocks, held.part) == (Tier.GPU, tuple(LAST.blocks), LAST)
    keeper.close_all()
