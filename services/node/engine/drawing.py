"""The results of rows that pass the last norm: scores of known tokens, drawn tokens, vectors."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from msgspec.structs import replace

from services.node.engine.base import Draw, Row
from services.node.engine.model import Model
from services.node.engine.processors import Processor
from services.node.engine.sampling import Drawn, sample, score
from shared.errors import Conflict, ModelError
from shared.messages.serving import Pooling

NOT_FINITE = ModelError("the model's states are not finite: NaN or infinite")
SCORED_AT_ONCE = 64
"""Positions scored at a time. Their logits take 32 MiB for 128k tokens; those of a whole step would
take 256 MiB."""


def scored(
    model: Model, unit: Any, hidden: torch.Tensor, rows: Sequence[Row]
) -> list[tuple[Drawn, ...]]:
    """The log probabilities of each row's known tokens."""
    scored = []
    end = 0
    for row in rows:
        start, end = end, end + row.count
        found: list[Drawn] = []
        if known := row.score:
            positions = range(start + known.first, start + known.first + len(known.tokens))
            for at in range(0, len(positions), SCORED_AT_ONCE):
                some = slice(at, at + SCORED_AT_ONCE)
                logits = model.network.head(unit, hidden, positions[some])
                found += score(logits, known.tokens[some], known.top)
        scored.append(tuple(found))
    return scored


def drawn_after(
    model: Model, unit: Any, hidden: torch.Tensor, rows: Sequence[Row]
) -> tuple[tuple[Drawn, ...], ...]:
    """What is drawn after each row; empty for a row without a draw."""
    draws: list[Draw] = []
    positions: list[int] = []
    processors: list[Processor | None] = []
    proposed: list[int | None] = []
    end = 0
    for row in rows:
        end += row.count
        draw = row.draw
        if draw is None:
            continue
        draws.append(draw)
        positions.append(end - 1 - len(draw.proposed))
        processors.append(model.processors.of(row.sequence))
        proposed.append(None)
        for number, due in enumerate(draw.proposed, start=1):
            draws.append(replace(draw, index=draw.index + number))
            positions.append(positions[-1] + 1)
            processors.append(processors[-1])
            proposed.append(due)
    if not draws:
        return ((),) * len(rows)
    logits = model.network.head(unit, hidden, positions)
    drawn = iter(sample(logits, draws, processors, proposed, model.network.largest_ids))
    return tuple([_accepted(drawn, row.draw) if row.draw else () for row in rows])


def pooled(
    model: Model, unit: Any, hidden: torch.Tensor, rows: Sequence[Row]
) -> list[tuple[Drawn, ...]]:
    """The vector of each row that completes one."""
    found: list[tuple[Drawn, ...]] = []
    end = 0
    for row in rows:
        start, end = end, end + row.count
        if row.pooling is None:
            found.append(())
            continue
        used = range(start, end)
        if row.pooling is not Pooling.MEAN:
            used = used[:1] if row.pooling is Pooling.CLS else used[-1:]
        states = model.network.states(unit, hidden, used).float()
        try:
            vector = model.sums.add(row, states) if row.pooling is Pooling.MEAN else states[0]
        except Conflict as error:
            found.append((Drawn(None, error=error),))
            continue
        if row.pooling is Pooling.MEAN:
            vector = (vector / row.limit).float()
        found.append((_finite(vector),) if row.gives_vector else ())
    return found


def _accepted(drawn: Iterator[Drawn], draw: Draw) -> tuple[Drawn, ...]:
    """Takes what was drawn for a row: the tokens up to the first that fails, or that failure alone
    if it comes first. A failure after tokens is left to the next step."""
    first = next(drawn)
    if not draw.proposed:
        return (first,)
    rest = list(islice(drawn, len(draw.proposed)))
    return (first, *(one for one in rest if one.token is not None))


def _finite(vector: torch.Tensor) -> Drawn:
    if not bool(vector.isfinite().all()):
        return Drawn(None, error=NOT_FINITE)
    return Drawn(None, vector=vector.cpu().numpy().astype("<f4").tobytes())
