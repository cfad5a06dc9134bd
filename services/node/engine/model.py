"""A model as the sweep runs it: its units, block by block, and what they are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from services.node.checkpoints.architecture import AnyConfig
from services.node.engine.attention import Span
from services.node.engine.base import Row, Weights
from services.node.engine.huge_pages import Pages
from services.node.engine.linear import Form
from services.node.engine.pooling import Sums
from services.node.engine.processors import Processors
from services.node.engine.step import Step
from shared.layout import BlockSpec, Manifest
from shared.parts import Part

if TYPE_CHECKING:
    from services.node.engine.graphs import DecodeGraphs


class Network(Protocol):
    """A model as the sweep runs it: a decoder, or an encoder of images or texts. Each has its own
    kinds of units."""

    @property
    def config(self) -> AnyConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def keeps_kv(self) -> bool:
        """Whether a sequence may come in several rows, because the KV of its positions is kept.
        False: attention goes both ways, and a sequence runs whole, in one row."""

    def refusal(self, row: Row) -> str:
        """Why a row of this model cannot be run on any stage; empty if it can."""

    def units(
        self, spec: BlockSpec, weights: Weights, form: Form, pages: Pages | None = None
    ) -> tuple[Any, ...]:
        """The units of a block; see BlockTensors."""

    def embed(self, unit: Any, rows: Sequence[Row]) -> torch.Tensor:
        """Returns [positions of the rows, hidden_size] in new memory. BadInput or RowsRefused if
        they do not fit the model."""

    def step(self, spans: Sequence[Span]) -> Step:
        """A step that runs layers over these rows, packed one after the other."""

    def head(self, unit: Any, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), tokens or classes] in float32, computed from the given rows of
        hidden."""

    def states(self, unit: Any, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The states [len(rows), hidden_size] after the last norm, from the given rows of
        hidden: what the head's logits are computed from."""

    def largest_ids(self, logits: torch.Tensor) -> torch.Tensor:
        """As in sampling.py, of logits from `head`."""


def layers_of(manifest: Manifest, config: AnyConfig, part: Part | None) -> range:
    """The layers of a part of the model, counted from 0. None: of all of it."""
    blocks, (start, stop) = manifest.blocks, (part.start, part.stop) if part else (0, 0)
    first, last = blocks[start].first_unit, blocks[stop - 1].last_unit
    return range(max(first - 1, 0), min(last, config.n_layers))


@dataclass(frozen=True, slots=True)
class Model:
    manifest: Manifest
    network: Network
    processors: Processors
    threads: int = 1
    """How many threads of this process run the model."""
    part: Part | None = None
    """See Engine.open_model. The same for `devices`."""
    devices: int = 1
    graphs: "DecodeGraphs | None" = None
    blocks: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)

    def layers(self, start: int, stop: int) -> range:
        """The layers of blocks start <= block < stop, counted from 0."""
        return layers_of(self.manifest, self.network.config, Part(start, stop))

    def layers_with_kv(self, start: int, stop: int) -> range:
        return self.layers(start, stop) if self.network.keeps_kv else range(0)

    def layer_units(self, block: int) -> tuple[Any, ...]:
        units, first = self.blocks[block], self.manifest.blocks[block].first_unit
        return units[max(1 - first, 0) : self._last - first]

    def head_unit(self, block: int) -> Any | None:
        ends = self.manifest.blocks[block].last_unit == self._last
        return self.blocks[block][-1] if ends else None

    @property
    def _last(self) -> int:
        return self.network.config.n_units - 1

    def step(self, spans: Sequence[Span], hidden: torch.Tensor) -> Step:
        """A step for these rows. `hidden`: [rows, hidden_size]."""
        plain = not any(sequence.adapter for sequence, _, _ in spans)
        graphed = self.graphs.step(spans, hidden) if self.graphs and plain else None
        return graphed or self.network.step(spans)
