"""What a node's process leaves at its keeper, and what the next process makes of it."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.node.hosting.inheritance import ARENA as IN_ARENA
from services.node.hosting.inheritance import CACHE as IN_CACHE
from services.node.keeper.link import Estate, KeeperLink, Memory
from services.node.keeper.messages import Alive, Asked, Drop, Forget, Hold, Space
from services.node.keeper.table import Table
from shared.ids import Generation, NodeId
from shared.messages.pool import Tier
from tests.unit.node.cluster import ALL, ARENA, Nodes, nodes

SETTINGS: dict[str, Any] = {"host_bytes": ARENA}


class KeptHere(KeeperLink):
    """The same table as a keeper's process has, in this process."""

    def __init__(self) -> None:
        super().__init__(Path(), NodeId("a"), 60.0)
        self.table = Table()
        self.generations: set[Generation] = set()

    @property
    def there(self) -> bool:
        return True

    async def claim(self, waits: Callable[[], None] = lambda: None) -> Estate:
        memories = {
            name: Memory(os.dup(each.descriptor), each.held.nbytes, each.held.about)
            for name, each in self.table.memories.items()
        }
        return Estate(memories, self.table.spaces, frozenset(self.generations))

    def _say(self, message: Asked, descriptor: int | None = None) -> None:
        replaced = None
        match message:
            case Hold():
                assert descriptor is not None
                replaced = self.table.hold(message, os.dup(descriptor))
            case Drop():
                replaced = self.table.drop(message)
            case Space():
                self.table.note(message)
            case Forget():
                self.table.forget(message)
            case Alive(generation):
                self.generations.add(Generation(generation))
        if replaced is not None:
            os.close(replaced)

    def space(self, memory: str) -> Space:
        (space,) = self.table.memories[memory].spaces.values()
        return space

    def scribble(self, memory: str, offset: int) -> None:
        """One byte is not as it was."""
        descriptor = self.table.memories[memory].descriptor
        (before,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([before ^ 1]), offset)

    def close_all(self) -> None:
        for memory in self.table.memories.values():
            os.close(memory.descriptor)


@pytest.fixture
async def keeper() -> AsyncIterator[KeptHere]:
    keeper = KeptHere()
    yield keeper
    keeper.close_all()


@pytest.fixture
async def up(tmp_path: Path, checkpoint: Path, keeper: KeptHere) -> AsyncIterator[Nodes]:
    """A node that runs the model, in whole."""
    async with nodes(tmp_path, checkpoint) as running:
        await running.start("a", keeper=keeper, **SETTINGS)
        running.record = await running.import_model("a")
        await running.promoted("a")
        yield running


async def next_process(up: Nodes, keeper: KeptHere) -> dict[Tier, tuple[int, ...]]:
    """What it has in memory once it is there. Its disk can give it nothing by then."""
    if "a" in up.services:
        await up.stop("a")
    service = await up.start("a", keeper=keeper, **SETTINGS)
    return {holding.tier: holding.blocks for holding in service.in_memory()}


async def test_a_model_that_ran_runs_again_before_any_plan(up: Nodes, keeper: KeptHere) -> None:
    tokens = await up.generate("a")
    had = len(up.arrived("a"))
    assert await next_process(up, keeper) == {Tier.GPU: ALL}
    assert await up.generate("a", request="again") == tokens
    assert len(up.arrived("a")) == had


async def test_a_block_that_was_scribbled_over_is_not_taken_over(
    up: Nodes, keeper: KeptHere
) -> None:
    """The others are; with the next plan only this block is read."""
    tokens = await up.generate("a")
    space = keeper.space(IN_ARENA)
    assert (space.blocks, space.active) == (ALL, True)
    await up.stop("a")
    keeper.scribble(IN_ARENA, space.offset + space.nbytes // 2)
    held = await next_process(up, keeper)
    assert list(held) == [Tier.HOST]
    (wrong,) = set(ALL) - set(held[Tier.HOST])
    await up.apply("a", promote=ALL, event="again")
    ways = {m.block: m.transport for m in await up.until_arrived("a", ALL, "again")}
    assert ways == dict.fromkeys(ALL, "held") | {wrong: "disk"}
    assert await up.generate("a", request="again") == tokens
    assert keeper.space(IN_ARENA).blocks == ALL


async def test_a_model_that_slept_sleeps_on(up: Nodes, keeper: KeptHere) -> None:
    """In the host cache, and in the arena if the cache has no room for it."""
    await up.release("a", Tier.CACHE)
    assert keeper.table.memories[IN_ARENA].spaces == {}
    assert await next_process(up, keeper) == {Tier.CACHE: ALL}
    up.stored("a").rename(up.stored("a").with_name("away"))
    await up.apply("a", promote=ALL, event="wake")
    assert {m.transport for m in await up.until_arrived("a", ALL, "wake")} == {"host cache"}


async def test_a_copy_in_the_host_cache_is_right_or_gone(up: Nodes, keeper: KeptHere) -> None:
    await up.release("a", Tier.CACHE)
    space = keeper.space(IN_CACHE)
    await up.stop("a")
    keeper.scribble(IN_CACHE, space.offset)
    assert await next_process(up, keeper) == {}
    assert keeper.table.memories[IN_CACHE].spaces == {}
    assert up.services["a"]._hosting.cache.free == ARENA


async def test_what_is_released_is_forgotten(up: Nodes, keeper: KeptHere) -> None:
    up.stored("a").rename(up.stored("a").with_name("away"))  # from there a host copy would come
    await up.release("a")
    assert keeper.table.spaces == []
    assert await next_process(up, keeper) == {}


async def test_memory_of_another_size_is_taken_anew(up: Nodes, keeper: KeptHere) -> None:
    await up.stop("a")
    service = await up.start("a", keeper=keeper, arena_bytes=2 * ARENA)
    assert service.in_memory() == []
    assert keeper.table.memories[IN_ARENA].held.nbytes == 2 * ARENA
    assert IN_CACHE not in keeper.table.memories  # it has none any more
