"""The decoder, unit by unit: embedding, layers, and final norm with the head.

What a family of models has in other places than Llama: see services.node.model.families.

All products have a multiple of ROWS rows: see attention.py for why.
"""

from collections.abc import Sequence as Rows

import torch
from torch.nn import functional

from services.node.engine.activation import silu_times
from services.node.engine.attention import Attention, AttentionStep, Span, pad_rows
from services.node.engine.experts import add_experts
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
        self.attention = Attention(config, longest, kv_dtype(dtype, device), device)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Rows[int]) -> torch.Tensor:
        """Logits [len(rows), vocab] float32 after the given rows of hidden [n, hidden_size]."""
        config = self.config
        picked = hidden.new_zeros(pad_rows(len(rows)), config.hidden_size)
        picked[: len(rows)] = hidden[torch.tensor(rows, device=self.device)]
        normed = functional.rms_norm(picked, (config.hidden_size,), unit.norm, config.norm_eps)
        return unit.head(normed)[: len(rows)].float()


class LayerStep:
    """Runs layers over one step's packed rows; its buffers are used by one layer after another."""

    def __init__(self, model: Decoder, spans: Rows[Span], n_padded: int) -> None:
        config = model.config
        self._shape, self._eps = (config.hidden_size,), config.norm_eps
        self._experts = config.experts
        self._n = sum(count for _, _, count in spans)
        self._attention = AttentionStep(model.attention, model.frequencies, spans, n_padded)
        self._qkv, self._attended = self._attention.qkv, self._attention.attended
        if model.dtype != model.attention.dtype:
            self._qkv = torch.empty_like(self._qkv, dtype=model.dtype)
            self._attended = torch.empty_like(self._attended, dtype=model.dtype)
        shape = (n_padded, 2 * config.intermediate_size)
        self._gate_up = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._gate, self._up = self._gate_up.chunk(2, dim=1)
        self._active = torch.empty_like(self._up, memory_format=torch.contiguous_format)
        self._sigmoid = torch.empty_like(self._active, dtype=torch.float32)

    def run(self, layer: LayerUnit, hidden: torch.Tensor, kv: torch.Tensor) -> None:
        """hidden [padded rows, hidden_size] is updated; kv: see AttentionStep.run."""
        normed = functional.rms_norm(hidden, self._shape, layer.input_norm, self._eps)
        layer.qkv(normed, self._qkv)
        self._attend(layer, kv)
        hidden.add_(layer.o(self._attended))
        normed = functional.rms_norm(hidden, self._shape, layer.post_norm, self._eps)
        if isinstance(layer.mlp, ExpertMlp):
            assert self._experts is not None
            add_experts(hidden, normed, self._n, layer.mlp, self._experts)
            return
        layer.mlp.gate_up(normed, self._gate_up)
        silu_times(self._gate, self._up, self._sigmoid, self._active)
        hidden.add_(layer.mlp.down(self._active))

    def _attend(self, layer: LayerUnit, kv: torch.Tensor) -> None:
        attention = self._attention
        if self._qkv is not attention.qkv:
            attention.qkv.copy_(self._qkv)
        if layer.qk_norm is not None:
            qk = attention.qk
            normed = functional.rms_norm(qk, qk.shape[-1:], None, self._eps)
            torch.mul(normed, layer.qk_norm, out=qk)
        attention.run(kv, layer.window)
        if self._attended is not attention.attended:
            self._attended.copy_(attention.attended)
