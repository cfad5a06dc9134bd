"""A node that holds a part of a model, as one device of a group."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.node import real_parts
from services.node.engine.ranks import Ranks
from shared import subjects
from shared.errors import BadInput, CapacityExceeded
from shared.ids import NodeId
from shared.layout import PAGE
from shared.messages.pool import Holding, Tier
from shared.messages.story import StoryQuery, Told
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


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ranks]]:
    """Those of all nodes. Else they end with the node's process, which is that of the tests."""
    made: list[Ranks] = []

    def make(*args: Any) -> Ranks:
        made.append(Ranks(*args))
        return made[-1]

    monkeypatch.setattr(real_parts, "Ranks", make)
    yield made
    for each in made:
        each.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
async def test_two_nodes_of_a_machine_run_each_part_together(
    tmp_path: Path, checkpoint: Path, ranks: list[Ranks]
) -> None:
    """They say with how many processes, which is theirs to choose. Where a node was asked to run
    its part alone, it says nothing of others."""
    settings: dict[str, Any] = {
        "machine": "m",
        "tensor_parallel": "auto",
        "team_devices": 2,
        "arena_bytes": 400_000,
    }
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        tokens = await up.generate("a")
        assert settings["arena_bytes"] < up.record.nbytes
        for name, part in (("b", FIRST), ("c", LAST)):
            await up.start(name, **settings)
            pulls = dict.fromkeys(part.blocks, "a")
            await up.apply(name, pulls, part=part, devices=2)
            await up.until_arrived(name, tuple(part.blocks))
            assert any(" it: 2 devices run it together; " in t for t in await _said(up, name))
        assert await up.generate("b", "c", request="together") == tokens

        status = up.status("c")
        assert status is not None
        measured = [(costs.devices, costs.degree) for costs in status.profile.steps]
        assert measured == [(1, 1), (2, 1), (2, 2)]
        await up.release("c")
        await up.apply("c", dict.fromkeys(LAST.blocks, "a"), part=LAST, event="ev-2")
        await up.until_arrived("c", tuple(LAST.blocks), "ev-2")
        assert "2 devices" not in (await _said(up, "c"))[-1]
        assert len(ranks) == 2
        assert await up.generate("b", "c", request="one of them alone") == tokens


async def _said(up: Nodes, name: str) -> list[str]:
    """What the node has said of who runs the model."""
    query = StoryQuery(subject=up.record.model_id)
    told = await up.request(subjects.node_story(NodeId(name)), query, Told)
    return [step.text for step in told.steps if " it: " in step.text]


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
