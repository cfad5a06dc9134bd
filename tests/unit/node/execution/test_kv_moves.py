"""KV on its way between an engine and a data plane."""

from collections.abc import Callable

import pytest
import torch

from services.node.core.kv import PAGE, KvMover, KvPages
from services.node.core.microbatches import Bring, KvAsk, KvHere, Lend
from services.node.engine.kv import KvCache
from services.node.engine.kv_loan import KvLoan
from services.node.execution.kv_moves import KvMoves
from shared.errors import NotFound
from tests.unit.node.engine.test_kv import LAYERS, available, cache, read, start, write

BLOCKS = 0, 3


class Engine:
    def __init__(self, kv: KvCache) -> None:
        self.kv = kv

    def lend(self, key: str, blocks: tuple[int, int], first: int, stop: int) -> KvLoan:
        return self.kv.lend(key, LAYERS, first, stop)

    def give_back(self, loan: KvLoan) -> None:
        loan.end()
        self.kv.give_back(loan)


class Slow(KvMover):
    """Brings nothing before it is told to."""

    def __init__(self) -> None:
        self.wanted: list[tuple[KvPages, Callable[[bool], None]]] = []
        self.lent: list[bool] = []
        """Whether each may stay on the device."""

    def bring(
        self,
        address: str,
        region: str,
        digest: bytes,
        pages: KvPages,
        brought: Callable[[bool], None],
    ) -> None:
        self.wanted.append((pages, brought))

    def reads_device(self, address: str) -> bool:
        return address == "mem://beside"

    def lend(
        self, pages: KvPages, lent: Callable[[str, bytes], None], *, on_device: bool = False
    ) -> None:
        self.lent.append(on_device)

    def end(self, region: str) -> None:
        raise AssertionError("nothing is lent here")


class Heard:
    def __init__(self) -> None:
        self.brings: list[tuple[Bring, bool]] = []

    def lent(self, lend: Lend, here: KvHere) -> None:
        raise AssertionError("nothing is lent here")

    def brought(self, bring: Bring, *, right: bool) -> None:
        self.brings.append((bring, right))


def test_what_is_stopped_touches_no_page_any_more_and_keeps_none() -> None:
    kv, mover, heard = cache(pages=4), Slow(), Heard()
    sequence = start(kv, "r#2")
    write(kv, sequence, [1.0] * 2 * PAGE)
    engine = Engine(kv)
    probe = engine.lend("r#2", BLOCKS, 0, 1)
    engine.give_back(probe)
    moves = KvMoves(engine, mover, heard, lambda call: call())  # type: ignore[arg-type]
    brings = [
        Bring("r#2", 0, BLOCKS, (at, at + PAGE), "mem://b", KvHere("r#2", 0, f"{at}", probe.form))
        for at in (0, PAGE)
    ]
    for bring in brings:
        moves.bring(bring)
    (first, came), (second, late) = mover.wanted
    first.fill(memoryview(bytearray(first.nbytes)))
    came(True)
    moves.stop("r#2")
    with pytest.raises(NotFound):
        second.fill(memoryview(bytearray(second.nbytes)))
    late(False)
    assert heard.brings == [(brings[0], True), (brings[1], False)]
    values = read(kv, sequence)[0, :, 0, 0, 0]
    assert torch.equal(values, torch.tensor([0.0] * PAGE + [1.0] * PAGE))
    kv.free(("r#2",))
    assert available(kv) == 4


def test_the_lender_learns_whether_its_device_is_read() -> None:
    kv, mover = cache(pages=4), Slow()
    write(kv, start(kv, "r#1"), [1.0] * PAGE)
    moves = KvMoves(Engine(kv), mover, Heard(), lambda call: call())  # type: ignore[arg-type]
    asked = KvAsk("r#1", b"", 0, *BLOCKS, 0, PAGE, "mem://taker", "r#2")
    for address in ("mem://beside", "mem://elsewhere"):
        moves.lend(Lend(moves.asked(address, asked)))
    assert mover.lent == [True, False]
    alone = KvMoves(Engine(kv), None, Heard(), lambda call: call())  # type: ignore[arg-type]
    assert alone.asked("mem://beside", asked) == asked
