"""KV that is lent: its bytes arrive unchanged, and its pages stay until the loan is over."""

import pytest
import torch

from services.node.core.kv import PAGE, movable
from services.node.engine.kv import KvCache
from shared.errors import BadInput, NotFound
from tests.unit.node.engine.test_kv import (
    LAYERS,
    MODEL,
    OTHER,
    available,
    cache,
    open_model,
    ran,
    read,
    shared,
    start,
    write,
)

TOKENS = list(range(1, 2 * PAGE + 4))
WHOLE = movable(len(TOKENS))


def taken_over(kv: KvCache, key: str) -> None:
    """Starts a sequence that waits for KV of TOKENS."""
    sequence = start(kv, key)
    kv.extend(sequence, WHOLE)


def test_the_pages_of_a_sequence_arrive_elsewhere_unchanged() -> None:
    here, there = cache(pages=8), cache(pages=8)
    ran(here, "r#1", TOKENS)
    taken_over(there, "r#2")
    for layer in LAYERS:  # as two stages of one layer each lend them
        one = range(layer, layer + 1)
        lent, wanted = here.lend("r#1", one, 0, WHOLE), there.lend("r#2", one, 0, WHOLE)
        assert lent.form == wanted.form
        image = memoryview(bytearray(lent.nbytes))
        lent.read(image)
        wanted.fill(image)
        here.give_back(lent)
        there.give_back(wanted)
    sequence = there.find("r#2")
    assert sequence is not None
    expected = torch.tensor(TOKENS[:WHOLE], dtype=torch.float32).view(1, -1, 1, 1, 1)
    assert torch.equal(read(there, sequence), expected.expand(len(LAYERS), -1, 2, 1, 2))


def test_what_stages_with_few_layers_lend_makes_a_whole() -> None:
    here, there = cache(pages=8), cache(pages=8)
    taken_over(there, "r#2")
    for layers in (range(2), range(2, 6)):
        stage = start(here, f"{layers}", layers)
        write(here, stage, [float(token) for token in TOKENS])
        lent = here.lend(stage.key, layers, 0, WHOLE)
        wanted = there.lend("r#2", layers, 0, WHOLE)
        image = memoryview(bytearray(lent.nbytes))
        lent.read(image)
        wanted.fill(image)
        here.free((stage.key,))
        assert available(here) < 8
        here.give_back(lent)
        there.give_back(wanted)
    assert available(here) == 8
    sequence = there.find("r#2")
    assert sequence is not None
    expected = torch.tensor(TOKENS[:WHOLE], dtype=torch.float32).view(1, -1, 1, 1, 1)
    assert torch.equal(read(there, sequence), expected.expand(len(LAYERS), -1, 2, 1, 2))


def test_what_has_come_is_cached_like_what_was_computed() -> None:
    kv = cache(pages=8)
    taken_over(kv, "r#2")
    sequence = kv.find("r#2")
    assert sequence is not None
    kv.keep(sequence, 0, TOKENS[:WHOLE])
    kv.free(("r#2",))
    assert kv.adopt(start(kv, "next"), tuple(TOKENS)) == WHOLE


def test_lent_pages_are_not_given_to_others_before_the_loan_is_over() -> None:
    kv = cache(pages=3)
    ran(kv, "r#1", TOKENS)
    loan = kv.lend("r#1", LAYERS, 0, PAGE)
    kv.free(("r#1",))
    assert available(kv) == 2
    kv.give_back(loan)
    assert available(kv) == 3
    kv.give_back(loan)
    assert available(kv) == 3


def test_once_the_model_is_closed_nothing_is_copied_any_more() -> None:
    kv = shared(pages=64)
    ran(kv, "r#1", TOKENS)
    loan = kv.lend("r#1", LAYERS, 0, PAGE)
    kv.close_model(MODEL)
    image = memoryview(bytearray(loan.nbytes))
    with pytest.raises(NotFound, match="closed"):
        loan.read(image)
    with pytest.raises(NotFound, match="closed"):
        loan.fill(image)
    open_model(kv, MODEL)
    before = available(kv, MODEL), available(kv, OTHER)
    kv.give_back(loan)
    assert (available(kv, MODEL), available(kv, OTHER)) == before


@pytest.mark.parametrize(
    ("key", "layers", "first", "stop"),
    [
        ("other", LAYERS, 0, PAGE),
        ("r#1", range(len(LAYERS) + 1), 0, PAGE),
        ("r#1", range(0), 0, PAGE),
        ("r#1", LAYERS, 0, PAGE - 1),
        ("r#1", LAYERS, 1, PAGE),
        ("r#1", LAYERS, PAGE, PAGE),
        ("r#1", LAYERS, -PAGE, PAGE),
        ("r#1", LAYERS, 0, 3 * PAGE),
    ],
)
def test_what_a_sequence_does_not_have_is_not_lent(
    key: str, layers: range, first: int, stop: int
) -> None:
    kv = cache()
    ran(kv, "r#1", TOKENS)
    with pytest.raises(NotFound):
        kv.lend(key, layers, first, stop)
    kv.free(("r#1",))
    assert available(kv) == 4


def test_an_image_of_another_size_is_refused() -> None:
    kv = cache()
    ran(kv, "r#1", TOKENS)
    loan = kv.lend("r#1", LAYERS, 0, PAGE)
    with pytest.raises(BadInput, match="bytes"):
        loan.fill(memoryview(bytearray(loan.nbytes - 1)))
