"""Whether a part may join a sweep. A part that may not changes nothing."""

from collections.abc import Mapping, Sequence

import torch

from services.node.checkpoints.vit_config import VitConfig
from services.node.engine.adapters import Adapter
from services.node.engine.base import Row, RowsRefused, Score, SequenceKey, StagePart
from services.node.engine.copies import to_device
from services.node.engine.kv import KvCache
from services.node.engine.kv_sequence import KvSequence
from services.node.engine.model import Model
from shared.errors import BadInput, Conflict, NotFound
from shared.ids import ModelId


def check_part(part: StagePart, model_id: ModelId, model: Model, kv: KvCache, at: int) -> None:
    """Whether the part may join a sweep that has come to block `at`: see `Sweep.join`."""
    n_blocks = model.manifest.n_blocks
    if not part.rows or not at <= part.start < part.stop <= n_blocks:
        raise BadInput(
            f"{len(part.rows)} rows for blocks {part.start}-{part.stop - 1} of {n_blocks} in a "
            f"sweep at block {at}: at least one row and one block ahead are needed"
        )
    needed = range(part.start, part.start + 1 if part.waits else part.stop)
    missing = [block for block in needed if block not in model.blocks]
    if missing:
        raise NotFound(f"blocks {missing} of model {model_id} are not held here")
    stage = (model_id, (part.start, part.stop))
    ends: dict[SequenceKey, int] = {}
    config = model.network.config
    # The positions of an image have the token 0.
    vocab_size = 1 if isinstance(config, VitConfig) else config.vocab_size
    for row in part.rows:
        sequence = kv.find(row.sequence)
        if not (sequence and sequence.model_id == model_id and sequence.runs_on(row, part.start)):
            _check_row(row, stage, sequence, ends)
        _check_ids(row, vocab_size)
        if row.score is not None:
            _check_score(row, row.score, vocab_size)
        if why := model.network.refusal(row):
            raise RowsRefused((row.sequence,), BadInput(f"sequence {row.sequence}: {why}"))


def check_adapters(
    part: StagePart, model_id: ModelId, kv: KvCache, adapters: Mapping[ModelId, Adapter]
) -> None:
    """RowsRefused for rows whose adapter is not here."""
    for row in part.rows:
        sequence = kv.find(row.sequence)
        if sequence is not None and sequence.adapter != row.adapter:
            why = Conflict(f"sequence {row.sequence} was begun with another adapter")
            raise RowsRefused((row.sequence,), why)
        found = adapters.get(row.adapter)
        if row.adapter and (found is None or found.base != model_id):
            missing = NotFound(f"adapter {row.adapter} of model {model_id} is not in memory here")
            raise RowsRefused((row.sequence,), missing)


def _check_row(
    row: Row,
    stage: tuple[ModelId, tuple[int, int]],
    sequence: KvSequence | None,
    ends: dict[SequenceKey, int],
) -> None:
    """Checks one row. `ends`: the length that each sequence with earlier rows in the part will
    have after them."""
    if sequence is None and row.position > 0 and row.sequence not in ends:
        raise NotFound(f"sequence {row.sequence} is not known here; it starts at position 0")
    if sequence and (sequence.model_id, sequence.blocks) != stage:
        raise Conflict(f"sequence {row.sequence} was begun by another stage here")
    end = ends.get(row.sequence, sequence.length if sequence else 0)
    unsure = sequence.proposed if sequence and row.sequence not in ends else 0
    if not end - unsure <= row.position <= end or (row.position == 0 and sequence):
        raise Conflict(
            f"sequence {row.sequence} has {end} positions here; a row cannot start at "
            f"{row.position}"
        )
    if row.position + row.count > row.limit or row.count <= row.proposed:
        raise BadInput(
            f"sequence {row.sequence}: {row.count} positions from {row.position} on, "
            f"{row.proposed} of them proposed; expected at least one that is not, and an end "
            f"within its limit {row.limit}"
        )
    ends[row.sequence] = row.position + row.count


def _check_ids(row: Row, vocab_size: int) -> None:
    """RowsRefused for tokens out of range: a GPU would read outside of its memory."""
    if not _are_ids(row.tokens, vocab_size):
        why = BadInput(f"sequence {row.sequence}: ids go from 0 to {vocab_size - 1}")
        raise RowsRefused((row.sequence,), why)


def _check_score(row: Row, score: Score, vocab_size: int) -> None:
    """RowsRefused for positions or tokens out of range."""
    placed = score.first >= 0 and score.first + len(score.tokens) <= row.count
    if not placed or not _are_ids(score.tokens, vocab_size):
        why = BadInput(
            f"sequence {row.sequence}: {len(score.tokens)} tokens to score from position "
            f"{score.first} of {row.count} on; ids go from 0 to {vocab_size - 1}"
        )
        raise RowsRefused((row.sequence,), why)


def _are_ids(tokens: Sequence[int], vocab_size: int) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size)


def checked_hidden(part: StagePart, model: Model) -> torch.Tensor:
    expected = (sum(row.count for row in part.rows), model.network.config.hidden_size)
    if part.hidden is None or tuple(part.hidden.shape) != expected:
        got = None if part.hidden is None else tuple(part.hidden.shape)
        raise BadInput(f"hidden states {got} for blocks from {part.start} on; expected {expected}")
    return to_device(part.hidden.to(model.network.dtype, copy=True), model.network.device)
