"""The lender's part of a handover: KV goes out in pieces, as layers have run.

A *piece* is the KV of some blocks and positions, which nobody writes to any more: at first of whole
pages. What has run when the KV is asked for is lent at once. If this node, alone, still runs the
prompt, the rest follows while it runs: a block's KV is final once the block has run. So the prefill
hides the transfer, but for the last block's.

After that the new leader asks for more, and gets what has run since, page or not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.node.core.kv import PAGE, Kv
from services.node.core.microbatches import Command, Handled, KvAsk, KvHere, Lend, Path, Send
from services.node.core.rows import Row, SequenceKey
from shared.ids import ModelId

PIECE_BYTES = 16 << 20
"""About the most bytes of a piece. Larger pieces would cost less time each, but a node has to have
room for several (`services.node.moving.kv_room`), and the reader has the last one so much later."""


def lend(ask: KvAsk, path: Path, stage: int, secret: bytes) -> KvAsk | None:
    """What a stage lends to the new leader. `path`: of the sequence, whose `stage` this node is.
    None: nothing."""
    if secret and ask.secret == secret:
        ours = path.stages[stage]
        if ask.any_cut or (ours.start, ours.stop) == (ask.start, ask.stop):
            return msgspec.structs.replace(ask, start=ours.start, stop=ours.stop)
    return None


@dataclass(slots=True)
class _Open:
    """A sequence whose KV is asked for while its prompt runs here."""

    ask: KvAsk
    model_id: ModelId
    whole: int
    """Positions before this one were lent in all blocks."""
    block: int
    """The step that runs computes positions from `whole` on. Their KV was lent up to this block."""
    block_bytes: int
    """About the bytes of one position in a block that keeps KV."""
    cause: str


class Lendings:
    def __init__(self, kv: Kv, handled: Handled) -> None:
        self._kv = kv
        self._handled = handled
        self._open: dict[SequenceKey, list[_Open]] = {}

    def begin(self, ask: KvAsk, model_id: ModelId, ran: int) -> list[Command]:
        """Lends `ask.sequence`'s KV, of which `ran` positions have run in all blocks of this stage,
        and the rest as it runs."""
        kept = max(1, len(self._kept(model_id, ask.start, ask.stop)))
        each = max(1, self._kv.position_bytes(model_id) // kept)
        opened = _Open(ask, model_id, ask.first, ask.start, each, self._handled.cause)
        commands = list(self._lent(opened, min(ran, ask.end), ask.stop))
        if opened.whole < ask.end:
            self._open.setdefault(ask.sequence, []).append(opened)
        return commands

    def more(self, ask: KvAsk, model_id: ModelId, ran: int) -> list[Command]:
        """Lends one piece of what has run from `ask.first` on, if anything has."""
        kept = self._kept(model_id, ask.start, ask.stop)
        most = max(1, PIECE_BYTES // max(1, self._kv.position_bytes(model_id)))
        end = min(ran, ask.end, ask.first + most)
        if not kept or end <= ask.first:
            return [refused(ask, self._handled.cause)]
        piece = msgspec.structs.replace(ask, start=kept[0], stop=kept[-1] + 1, end=end)
        return [Lend(piece, cause=self._handled.cause)]

    def wants(self, keys: tuple[SequenceKey, ...]) -> bool:
        """Whether KV of these sequences is asked for."""
        return any(key in self._open for key in keys)

    def reached(self, row: Row, block: int) -> list[Command]:
        """The row has run up to this block, and all positions before it through all blocks."""
        commands: list[Command] = []
        asked = self._open.pop(row.sequence, [])
        for opened in asked:
            ask = opened.ask
            commands += self._lent(opened, min(row.position, ask.end), ask.stop)
            upto = min(row.position + row.count - row.proposed, ask.end)
            commands += self._lent(opened, upto, min(block, ask.stop))
        if left := [opened for opened in asked if opened.whole < opened.ask.end]:
            self._open[row.sequence] = left
        return commands

    def over(self, key: SequenceKey) -> list[Command]:
        """The sequence ends here: what was not lent will not be."""
        return [refused(each.ask, each.cause) for each in self._open.pop(key, ())]

    def _lent(self, opened: _Open, position: int, block: int) -> Iterator[Command]:
        """Lends what has come since, now that positions up to `position` have run in the blocks up
        to `block`."""
        ask, position = opened.ask, position // PAGE * PAGE
        if position <= opened.whole or block <= opened.block:
            return
        for piece in self._pieces(opened, block, position):
            yield Lend(piece, cause=opened.cause)
        opened.block = block
        if block == ask.stop:
            opened.whole, opened.block = position, ask.start

    def _pieces(self, opened: _Open, block: int, position: int) -> Iterator[KvAsk]:
        """So many blocks at a time as make a piece; and fewer positions if one block is more."""
        ask, first = opened.ask, opened.whole
        kept = self._kept(opened.model_id, opened.block, block)
        many = max(1, PIECE_BYTES // (opened.block_bytes * (position - first)))
        run = max(1, PIECE_BYTES // (opened.block_bytes * PAGE)) * PAGE
        for index in range(0, len(kept), many):
            start, stop = kept[index], kept[index : index + many][-1] + 1
            for at in range(first, position, run):
                end = min(at + run, position)
                yield msgspec.structs.replace(ask, start=start, stop=stop, first=at, end=end)

    def _kept(self, model_id: ModelId, start: int, stop: int) -> list[int]:
        """The blocks that keep KV."""
        return [b for b in range(start, stop) if self._kv.keeps(model_id, b, b + 1)]


def refused(ask: KvAsk, cause: str) -> Command:
    return Send(ask.to, KvHere(ask.taker, ask.stage), cause=cause)
