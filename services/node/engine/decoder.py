"""The decoder, unit by unit: embedding, layers, and final norm with the head.

What a family of models has in other places than Llama: see services.node.model.families.

All products have a multiple of ROWS rows: see attention.py for why.
"""

from collections.abc import Sequence as Rows

import torch

from services.node.engine.attention import Attention, Span, pad_rows
from services.node.engine.experts import add_experts
from services.node.engine.ops import ops_for
from services.node.engine.rope import inverse_frequencies
from services.node.engine.weights import ExpertMlp, HeadUnit, LayerUnit
from services.node.model.config import ModelConfig


def kv_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the keys and values of a model in `dtype`: products of bf16 matrices as small as
    attention's are slow on a CPU, where memory for KV in fp32 is cheap."""
    return torch.float32 if device.type == "cpu" else dtype


class Decoder:
    """What a model's steps share."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, longest: int
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.ops = ops_for(device, dtype)
        self.attention = Attention(config, longest, kv_dtype(dtype, device), device)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Rows[int]) -> torch.Tensor:
        """Logits [len(rows), vocab] float32 after the given rows of hidden [n, hidden_size]."""
        config = self.config
        picked = hidden.new_zeros(pad_rows(len(rows)), config.hidden_size)
        picked[: len(rows)] = hidden[torch.tensor(rows, device=self.device)]
        normed = self.ops.rms_norm(picked, unit.norm, config.norm_eps)
        return unit.head(normed)[: len(rows)].float()


class LayerStep:
    """Runs layers over one step's packed rows."""

    def __init__(self, model: Decoder, spans: Rows[Span], n_padded: int) -> None:
        self._ops, self._eps = model.ops, model.config.norm_eps
        self._experts = model.config.experts
        self._n = sum(count for _, _, count in spans)
        self._attention = model.ops.attention(model.attention, model.frequencies, spans, n_padded)

    def run(self, layer: LayerUnit, hidden: torch.Tensor, kv: torch.Tensor) -> None:
        """hidden [padded rows, hidden_size] is updated; kv: see Step.run."""
        ops = self._ops
        qkv = layer.qkv(ops.rms_norm(hidden, layer.input_norm, self._eps))
        attended = self._attention.run(qkv, layer.qk_norm, kv, layer.window)
        hidden.add_(layer.o(attended))
        normed = ops.rms_norm(hidden, layer.post_norm, self._eps)
        if isinstance(layer.mlp, ExpertMlp):
            assert self._experts is not None
            add_experts(hidden, normed, self._n, layer.mlp, self._experts, ops)
        else:
            hidden.add_(layer.mlp.down(ops.silu_times(layer.mlp.gate_up(normed))))
