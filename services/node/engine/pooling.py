"""The vectors of prompts, from the states of their positions after the model's last norm.

A prompt may come in several rows. So the stage with the head keeps the sum of the states so far,
beside the sequence's KV. It is added up in float64, one position after the other (which is what
`cumsum` does on a CPU), so a vector has the same bits however its prompt was cut.
"""

from collections.abc import Iterable

import torch

from services.node.engine.base import Row, SequenceKey
from shared.errors import Conflict


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
