"""An encoder of texts (BERT; Devlin et al. 2018), unit by unit: embeddings, layers, and the last
norm. It gives vectors and draws nothing.

A text runs whole, in one row, because attention goes both ways; nothing is kept afterwards. Texts
of any length are packed one after the other, without padding. Products, norms and GELU treat each
position by itself, and each text attends by itself. So a text's result does not depend on the
others of a step, except for torch's own bf16 products (linear.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from services.node.checkpoints.bert_config import (
    POSITIONS,
    TYPES,
    WORDS,
    BertConfig,
    incoming_norm,
    layer_prefix,
)
from services.node.engine.attention import Span
from services.node.engine.base import Bell, Row, Weights
from services.node.engine.copies import to_device
from services.node.engine.huge_pages import Pages
from services.node.engine.linear import Form, Linear
from services.node.engine.weights import BlockTensors, Norm
from shared.errors import BadInput
from shared.layout import BlockSpec

NO_TOKENS = "the model gives vectors, and draws and scores no tokens"


@dataclass(frozen=True, slots=True)
class WordUnit:
    words: torch.Tensor
    positions: torch.Tensor
    kind: torch.Tensor
    """[hidden], added to every position: all are of the first kind of tokens."""


@dataclass(frozen=True, slots=True)
class TextLayer:
    before: Norm
    qkv: Linear
    o: Linear
    between: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class LastNorm:
    norm: Norm


TextUnit = WordUnit | TextLayer | LastNorm


class TextTensors(BlockTensors):
    def text_unit(self, config: BertConfig, unit: int) -> TextUnit:
        if unit == 0:
            kinds = self._joined([TYPES])
            return WordUnit(self._joined([WORDS]), self._joined([POSITIONS]), kinds[0])
        before = self._norm(incoming_norm(unit))
        if unit == config.n_units - 1:
            return LastNorm(before)
        layer = layer_prefix(unit)
        return TextLayer(
            before=before,
            qkv=self._linear(layer + "attention.self.", ("query", "key", "value")),
            o=self._linear(layer + "attention.output.", ("dense",)),
            between=self._norm(layer + "attention.output.LayerNorm"),
            up=self._linear(layer + "intermediate.", ("dense",)),
            down=self._linear(layer + "output.", ("dense",)),
        )


class TextEncoder:
    """The parts that all steps of a model share."""

    keeps_kv = False

    def __init__(self, config: BertConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device

    def refusal(self, row: Row) -> str:
        if row.draw or row.score or not row.pooling:
            return NO_TOKENS
        if row.position or row.count != row.limit:
            return f"{row.count} positions from {row.position} on; expected all {row.limit}"
        if row.count > self.config.context_length:
            return f"{row.count} positions; the model has {self.config.context_length}"
        return ""

    def units(
        self, spec: BlockSpec, weights: Weights, form: Form, pages: Pages | None = None
    ) -> tuple[TextUnit, ...]:
        tensors = TextTensors(spec, weights, form, pages)
        units = range(spec.first_unit, spec.last_unit + 1)
        return tuple(tensors.text_unit(self.config, unit) for unit in units)

    def embed(self, unit: WordUnit, rows: Sequence[Row]) -> torch.Tensor:
        """Returns [positions of the rows, hidden_size]. BadInput unless each has a token."""
        tokens = [token for row in rows for token in row.tokens]
        places = [place for row in rows for place in range(row.count)]
        if len(tokens) != len(places):
            raise BadInput(f"{len(tokens)} tokens for {len(places)} positions")
        ids, at = (to_device(torch.tensor(each), self.device) for each in (tokens, places))
        return (unit.words[ids] + unit.kind).add_(unit.positions[at])

    def step(self, spans: Sequence[Span]) -> "TextStep":
        return TextStep(self, [count for _, _, count in spans])

    def head(self, unit: LastNorm, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        raise BadInput(NO_TOKENS)

    def states(self, unit: LastNorm, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        picked = hidden[to_device(torch.tensor(rows), self.device)]
        return self.normed(picked, unit.norm)

    def largest_ids(self, logits: torch.Tensor) -> torch.Tensor:
        raise BadInput(NO_TOKENS)

    def normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        shape = (self.config.hidden_size,)
        return functional.layer_norm(x, shape, norm.weight, norm.bias, self.config.norm_eps)


class TextStep:
    """Runs layers over the texts of one step."""

    def __init__(self, encoder: TextEncoder, counts: Sequence[int]) -> None:
        """`counts`: the positions of each text."""
        self._encoder = encoder
        self._counts = counts

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[TextLayer]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        """Runs the first block's layers. Updates hidden [rows, hidden_size]; kv stays empty."""
        for layer in next(iter(blocks)):
            self._run(layer, hidden)
        return 1

    def _run(self, layer: TextLayer, hidden: torch.Tensor) -> None:
        encoder = self._encoder
        normed = encoder.normed(hidden, layer.before)
        layer.o.add(self._attended(layer.qkv(normed)), normed)
        hidden.copy_(encoder.normed(normed, layer.between))
        layer.down.add(functional.gelu(layer.up(hidden)), hidden)

    def _attended(self, qkv: torch.Tensor) -> torch.Tensor:
        """[rows, 3 x hidden_size] to [rows, hidden_size]."""
        heads = qkv.view(1, len(qkv), 3, self._encoder.config.n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = [
            functional.scaled_dot_product_attention(*text)[0].transpose(0, 1).flatten(1)
            for text in torch.split(heads, list(self._counts), dim=3)
        ]
        return torch.cat(attended)
