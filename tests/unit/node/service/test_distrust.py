"""A gateway says that a node answers wrong: the node looks for itself."""

import asyncio
from pathlib import Path

import pytest

from services.node import doubt
from services.node.core.known_answers import KnownAnswers
from services.node.hosting.hosting import Hosting
from shared import subjects
from shared.errors import EngineFailed
from shared.ids import ModelId, NodeId
from shared.messages.pool import NodeStatus
from shared.messages.serving import Distrust
from tests.unit.node.cluster import WAIT_S, Nodes, nodes

WORD = "a stranger says so"


async def tell(up: Nodes) -> None:
    await up.bus.publish(subjects.node_distrust(NodeId("a")), Distrust(why=WORD))


def unfit(up: Nodes) -> str:
    said = [m for m in up.statuses.messages if isinstance(m, NodeStatus)]
    return said[-1].unfit if said else ""


async def test_a_gateways_word_alone_ends_no_node(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubt, "APART_S", 0.0)
    looked: asyncio.Queue[list[ModelId]] = asyncio.Queue()
    damaged = Hosting.damaged

    async def look(hosting: Hosting) -> list[ModelId]:
        found = await damaged(hosting)
        looked.put_nowait(found)
        return found

    monkeypatch.setattr(Hosting, "damaged", look)
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        before = await up.generate("a", request="before")
        for _ in range(3):
            await tell(up)
            async with asyncio.timeout(WAIT_S):
                assert await looked.get() == []
        assert await up.generate("a", request="after") == before
        assert not up.services["a"]._doubt.why


async def end(tmp_path: Path, checkpoint: Path, *, damage: bool) -> None:
    """A node is told, and raises what it ends with. `damage`: its weights have changed."""
    async with nodes(tmp_path, checkpoint, "a") as up:
        await up.promoted("a")
        if damage:
            (hosted,) = up.services["a"]._hosting._hosted.values()
            hosted.span.memory[0] ^= 0xFF
        await tell(up)
        await up.statuses.until(lambda: bool(unfit(up)))


async def test_it_ends_if_its_weights_have_changed(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(EngineFailed, match=f"{WORD}; its weights have changed in memory"):
        await end(tmp_path, checkpoint, damage=True)


async def test_it_ends_if_its_answers_have_changed(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KnownAnswers, "changed", lambda _: [ModelId("m")])
    with pytest.raises(EngineFailed, match=f"{WORD}; its answers have changed"):
        await end(tmp_path, checkpoint, damage=False)
