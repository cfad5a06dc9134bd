"""KV that is lent: its bytes arrive unchanged, and its pages stay until the loan is over."""

import math

import pytest
import torch

from services.node.core.kv import PAGE, movable, whole_pages
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


@pytest.mark.parametrize("on_device", [False, True])
def test_the_pages_of_a_sequence_arrive_elsewhere_unchanged(on_device: bool) -> None:
    here, there = cache(pages=8), cache(pages=8)
    ran(here, "r#1", TOKENS)
    taken_over(there, "r#2")
    for layer in LAYERS:  # as two stages of one layer each lend them
        one = range(layer, layer + 1)
        lent, wanted = here.lend("r#1", one, 0, WHOLE), there.lend("r#2", one, 0, WHOLE)
        assert lent.form == wanted.form
        memory = bytearray(lent.nbytes)
        image = torch.frombuffer(memory, dtype=torch.uint8) if on_device else memoryview(memory)
        lent.read(image)
        wanted.fill(image)
        here.give_back(lent)
        there.give_back(wanted)
    sequence = there.find("r#2")
    assert sequence is not None
    expected = torch.tensor(TOKENS[:WHOLE], dtype=torch.float32).view(1, -1, 1, 1, 1)
    assert torch.equal(read(there, sequence), expected.expand(len(LAYERS), -1, 2, 1, 2))


@pytest.mark.parametrize(
    ("first", "stop"),
    [(0, 5), (3, 5), (3, PAGE), (PAGE - 1, PAGE + 1), (5, 2 * PAGE + 2), (2 * PAGE, 2 * PAGE + 1)],
)
def test_any_positions_arrive_and_pages_before_and_after_stay(first: int, stop: int) -> None:
    """Of the page in which they end, the rest is erased: what came of it may be anything."""
    here, there = cache(pages=8), cache(pages=8)
    write(here, start(here, "r#1"), [*map(float, TOKENS[:stop]), *[math.inf] * PAGE])
    wanted = start(there, "r#2")
    write(there, wanted, [-1.0] * 3 * PAGE)
    lent, into = (kv.lend(f"r#{n}", LAYERS, first, stop) for n, kv in ((1, here), (2, there)))
    image = memoryview(bytearray(lent.nbytes))
    lent.read(image)
    into.fill(image)
    expected = torch.full((3 * PAGE,), -1.0)
    expected[first // PAGE * PAGE : whole_pages(stop)] = 0
    expected[first // PAGE * PAGE : stop] = torch.tensor(TOKENS[first // PAGE * PAGE : stop])
    found = read(there, wanted)
    assert torch.equal(found, expected.view(1, -1, 1, 1, 1).expand(len(LAYERS), -1, 2, 1, 2))


def test_kv_of_kernels_that_transpose_keys_is_another() -> None:
    here, there = cache(), KvCache(4 * PAGE, torch.device("cpu"))
    there.open_model(MODEL, LAYERS, 1, 2, torch.float32, transposed=True)
    forms = set()
    for kv in (here, there):
        write(kv, start(kv, "r"), [1.0])
        forms.add(kv.lend("r", LAYERS, 0, 1).form)
    assert len(forms) == 2


def test_a_sequence_whose_kv_came_in_part_goes_on_after_that_part() -> None:
    """And has no page that it does not need, with what was to come in it."""
    kv = cache(pages=8)
    sequence = start(kv, "r#2")
    write(kv, sequence, [7.0] * 4 * PAGE)
    kv.cut(sequence, PAGE + 3)
    assert available(kv) == 6
    write(kv, sequence, [8.0] * PAGE)
    values = read(kv, sequence)[0, :, 0, 0, 0]
    assert values[PAGE + 3 : 2 * PAGE + 3].tolist() == [8.0] * PAGE
    assert values[2 * PAGE + 3 :].tolist() == [0.0] * (PAGE - 3)


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
    with pytest.raises(NotFound, match="any more"):
        loan.read(image)
    with pytest.raises(NotFound, match="any more"):
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
        ("r#1", LAYERS, 0, len(TOKENS) + 1),
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


class Kernels:
    """What the engine had begun before the loan, for an earlier owner of the pages: it writes to
    them when it ends."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv

    def synchronize(self) -> None:
        self._kv.of_layers(MODEL, LAYERS)[:] = -1.0


def test_pages_are_filled_once_what_the_engine_had_begun_is_done() -> None:
    kv = cache()
    sequence = start(kv, "r#2")
    kv.extend(sequence, PAGE)
    loan = kv.lend("r#2", LAYERS, 0, PAGE)
    loan.written = Kernels(kv)
    loan.fill(memoryview(bytearray(loan.nbytes)))
    assert not read(kv, sequence).any()
    image = memoryview(bytearray(loan.nbytes))
    loan.read(image)
    assert set(torch.frombuffer(image, dtype=torch.float32).tolist()) == {-1.0}


def test_an_image_of_another_size_is_refused() -> None:
    kv = cache()
    ran(kv, "r#1", TOKENS)
    loan = kv.lend("r#1", LAYERS, 0, PAGE)
    with pytest.raises(BadInput, match="bytes"):
        loan.fill(memoryview(bytearray(loan.nbytes - 1)))
    with pytest.raises(BadInput, match="bytes"):
        loan.fill(torch.zeros(loan.nbytes + 8, dtype=torch.uint8))
