"""The vectors of prompts, from the states of their positions after the model's last norm.

A prompt may come in several rows. So the stage with the head keeps the sum of the states so far,
beside the sequence's KV. It is added up in float64, one position after the other (which is what
`cumsum` does on a CPU), so a vector has the same bits however its prompt was cut.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from services.node.engine.base import Row, SequenceKey
from services.node.engine.sampling import Drawn
from shared.errors import Conflict, ModelError
from shared.messages.serving import Pooling

if TYPE_CHECKING:
    from services.node.engine.model import Model


NOT_FINITE = ModelError("the model's states are not finite: NaN or infinite")


class Sums:
    """The sums of a model's sequences whose states are averaged."""

    def __init__(self) -> None:
        self._of: dict[SequenceKey, torch.Tensor] = {}

    def add(self, row: Row, states: torch.Tensor) -> torch.Tensor:
        """Adds the states [count, hidden_size] of the row, and returns the sum [hidden_size].
        Conflict if the sequence's earlier rows were not added here."""
        terms = states.double()
        if row.position:
            if row.sequence not in self._of:
                raise Conflict(f"sequence {row.sequence} was not averaged from its start here")
            terms = torch.cat((self._of[row.sequence].unsqueeze(0), terms))
        self._of[row.sequence] = total = terms.cumsum(0)[-1].clone()
        return total

    def free(self, sequences: Iterable[SequenceKey]) -> None:
        for sequence in sequences:
            self._of.pop(sequence, None)


def pooled(
    model: "Model", unit: Any, hidden: torch.Tensor, rows: Sequence[Row]
) -> list[tuple[Drawn, ...]]:
    """The vector of each row that completes one."""
    found: list[tuple[Drawn, ...]] = []
    end = 0
    for row in rows:
        start, end = end, end + row.count
        if row.pooling is None:
            found.append(())
            continue
        first = end - 1 if row.pooling is Pooling.LAST else start
        states = model.network.states(unit, hidden, range(first, end)).float()
        try:
            vector = states[-1] if row.pooling is Pooling.LAST else model.sums.add(row, states)
        except Conflict as error:
            found.append((Drawn(None, error=error),))
            continue
        if row.pooling is Pooling.MEAN:
            vector = (vector / row.limit).float()
        found.append((_finite(vector),) if row.gives_vector else ())
    return found


def _finite(vector: torch.Tensor) -> Drawn:
    if not bool(vector.isfinite().all()):
        return Drawn(None, error=NOT_FINITE)
    return Drawn(None, vector=vector.cpu().numpy().astype("<f4").tobytes())
