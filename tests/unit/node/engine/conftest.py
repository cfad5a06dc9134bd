from collections.abc import Sequence

import pytest
import torch

from services.node.engine import drawing
from services.node.engine.base import Draw
from services.node.engine.processors import Processor
from services.node.engine.sampling import Drawn, Largest, sample
from tests.unit.node.engine.models import Model, make_model


@pytest.fixture(scope="session")
def model() -> Model:
    """Grouped-query attention, 6 blocks of one unit each."""
    return make_model()


class Logits:
    """What the head computed since the last `take`: one row for each draw, in order."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        rows, self._rows = torch.stack(self._rows), []
        return rows

    def watch(
        self,
        values: torch.Tensor,
        draws: Sequence[Draw],
        processors: Sequence[Processor | None],
        proposed: Sequence[int | None],
        largest: Largest,
    ) -> list[Drawn]:
        self._rows.extend(values.clone())
        return sample(values, draws, processors, proposed, largest)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    seen = Logits()
    monkeypatch.setattr(drawing, "sample", seen.watch)
    return seen
