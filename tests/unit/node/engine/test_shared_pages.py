"""Packed weights that outlive their process: what is found is what was made, or it is not used."""

import os
from collections.abc import Iterator

import pytest
import torch

from services.node.engine import kernels
from services.node.engine.huge_pages import HUGE, LEAST, HugePages
from services.node.engine.linear import Form, linear
from services.node.engine.shared_pages import PackedBlocks, SharedPages, Taken
from services.node.memory.shelf import Keeping, Kept, Shelf
from shared.ids import ModelId

MODEL, OTHER, THIRD = ModelId("m"), ModelId("m2"), ModelId("m3")


class Keeper:
    """Holds descriptors, as a keeper's process does."""

    def __init__(self) -> None:
        self.held: dict[str, Kept] = {}

    def hold(self, name: str, descriptor: int, nbytes: int, about: str) -> None:
        self.drop(name)
        self.held[name] = Kept(os.dup(descriptor), nbytes, about)

    def drop(self, name: str) -> None:
        if name in self.held:
            os.close(self.held.pop(name).descriptor)

    def shelf(self) -> Shelf:
        """Of the next process."""
        left = {
            n: kept._replace(descriptor=os.dup(kept.descriptor)) for n, kept in self.held.items()
        }
        return Shelf(Keeping(self.hold, self.drop), left)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    for name in list(keeper.held):
        keeper.drop(name)


def packed(shelf: Shelf, form: Form = "packed", version: str = "", most: int = 0) -> PackedBlocks:
    compiled = kernels.load()
    assert compiled is not None
    blocks = PackedBlocks(shelf, form, compiled, most)
    blocks._made += version
    return blocks


def needs_huge_pages() -> None:
    descriptor = os.memfd_create("probe")
    os.ftruncate(descriptor, HUGE)
    can = SharedPages(descriptor, HUGE, filled=False).grow(1)
    os.close(descriptor)
    if not can:
        pytest.skip("needs MADV_COLLAPSE for shared memory (Linux 6.1)")


WEIGHT, BIAS = torch.randn(1024, 512), torch.randn(1024)
X = torch.randn(3, 512)


def attach(blocks: PackedBlocks, model: ModelId = MODEL) -> tuple[torch.Tensor, bool]:
    """The product with a block's one matrix, and whether it was packed before."""
    with blocks.of(model, 0, LEAST) as pages:
        product = linear(WEIGHT, BIAS, "packed", pages)
    return product(X), pages.filled


def test_the_next_process_packs_nothing_and_has_the_same_products(keeper: Keeper) -> None:
    needs_huge_pages()
    first, filled = attach(packed(keeper.shelf()))
    assert not filled
    (kept,) = keeper.held.values()
    assert kept.nbytes == 2 * HUGE  # 2 MiB and a little
    again, filled = attach(packed(keeper.shelf()))
    assert filled
    assert torch.equal(first, again)
    assert torch.equal(first, linear(WEIGHT, BIAS, "packed")(X))


def test_what_was_scribbled_over_is_packed_again(keeper: Keeper) -> None:
    needs_huge_pages()
    first, _ = attach(packed(keeper.shelf()))
    (kept,) = keeper.held.values()
    os.pwrite(kept.descriptor, b"x", 4711)
    again, filled = attach(packed(keeper.shelf()))
    assert not filled
    assert torch.equal(first, again)
    assert attach(packed(keeper.shelf()))[1]


def test_what_was_packed_in_another_way_is_packed_again(keeper: Keeper) -> None:
    needs_huge_pages()
    attach(packed(keeper.shelf()))
    assert not attach(packed(keeper.shelf(), version="2"))[1]
    assert not attach(packed(keeper.shelf(), "int8"))[1]


def test_a_closed_model_and_what_nobody_takes_are_dropped(keeper: Keeper) -> None:
    needs_huge_pages()
    shelf = keeper.shelf()
    attach(packed(shelf))
    attach(packed(shelf), OTHER)
    assert len(keeper.held) == 2
    shelf.drop(MODEL)
    assert list(keeper.held) == ["packed m2 0"]
    keeper.shelf().clear()
    assert keeper.held == {}


def test_what_stays_in_the_arena_is_packed_once(keeper: Keeper) -> None:
    for shelf in (Shelf(), keeper.shelf()):
        blocks = packed(shelf)
        first, filled = attach(blocks)
        assert not filled
        again, filled = attach(blocks)
        assert filled
        assert torch.equal(first, again)
        assert not attach(blocks, OTHER)[1]
        blocks.leave(MODEL)
        assert not attach(blocks)[1]
        assert attach(blocks, OTHER)[1]


def test_what_has_left_the_arena_stays_packed_until_its_room_is_needed(keeper: Keeper) -> None:
    for shelf in (Shelf(), keeper.shelf()):
        blocks = packed(shelf, most=2 * LEAST)
        first, _ = attach(blocks)
        attach(blocks, OTHER)
        blocks.leave(MODEL)
        again, filled = attach(blocks)
        assert filled
        assert torch.equal(first, again)
        blocks.leave(MODEL)
        blocks.leave(OTHER)
        assert not attach(blocks, ModelId("m3"))[1]  # takes the room of the first to leave
        assert attach(blocks, OTHER)[1]
        assert not attach(blocks)[1]


def test_nothing_that_is_gone_stays_beside_a_full_arena(keeper: Keeper) -> None:
    needs_huge_pages()
    blocks = packed(keeper.shelf(), most=LEAST)
    attach(blocks)
    attach(blocks, OTHER)  # more than `most`, and both are in the arena
    assert len(keeper.held) == 2
    blocks.leave(MODEL)
    assert list(keeper.held) == ["packed m2 0"]


def test_without_a_keeper_or_huge_pages_nothing_is_shared(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with packed(Shelf()).of(MODEL, 0, LEAST) as pages:
        assert isinstance(pages, Taken)
        assert isinstance(pages.pages, HugePages)
    monkeypatch.setattr(SharedPages, "grow", lambda self, end: False)
    with packed(keeper.shelf()).of(MODEL, 0, LEAST) as pages:
        assert isinstance(pages, Taken)
        assert isinstance(pages.pages, HugePages)
    assert keeper.held == {}


def test_what_was_packed_ahead_takes_only_free_room_and_gives_way_first() -> None:
    blocks = packed(Shelf(), most=2 * LEAST)
    attach(blocks)
    blocks.leave(MODEL)
    assert blocks.has_room(OTHER, 0, LEAST)
    first, _ = attach(blocks, OTHER)
    blocks.expect(OTHER)
    assert not blocks.has_room(THIRD, 0, LEAST)
    assert blocks.has_room(OTHER, 0, LEAST)  # it is there
    attach(blocks, THIRD)
    assert attach(blocks)[1]
    blocks.leave(MODEL)
    again, filled = attach(blocks, OTHER)
    assert not filled
    assert torch.equal(first, again)
