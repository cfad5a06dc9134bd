"""The decoder, unit by unit: embedding, layers, and final norm with the head.

What a family of models has in other places than Llama: see services.node.model.families.

All products have a multiple of ROWS rows: see attention.py for why.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from services.node.engine.activation import silu_times
from services.node.engine.attention import Attention, AttentionStep, Span, pad_rows
from services.node.engine.copies import to_device
from services.node.engine.experts import add_experts
from services.node.engine.rope import inverse_frequencies
from services.node.engine.weights import ExpertMlp, HeadUnit, LayerUnit
from services.node.model.config import ModelConfig

if TYPE_CHECKING:
    from services.node.engine.paged_attention import PagedStep
    from services.node.engine.triton_ops import TritonOps


class Decoder:
    """What a model's steps share."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        fused: bool = False,
    ) -> None:
        """`fused`: with the kernels for GPUs."""
        self.config, self.dtype, self.device = config, dtype, device
        self.ops = _triton_ops() if fused else None
        # Products of bf16 matrices as small as attention's are slow on a CPU, where memory for
        # KV in fp32 is cheap.
        kv_dtype = dtype if fused else torch.float32
        self.attention = Attention(config, longest, kv_dtype, device)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    def step(self, spans: Rows[Span], n_padded: int) -> "LayerStep":
        """Of these rows."""
        n = sum(count for _, _, count in spans)
        if self.ops is not None:
            fused = self.ops.attention(self.attention, self.frequencies, spans, n_padded)
            return FusedLayerStep(self, self.ops, fused, n)
        attention = AttentionStep(self.attention, self.frequencies, spans, n_padded)
        return PlainLayerStep(self, attention, n, n_padded)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Rows[int]) -> torch.Tensor:
        """Logits [len(rows), vocab] float32 after the given rows of hidden [n, hidden_size]."""
        config = self.config
        picked = hidden.new_zeros(pad_rows(len(rows)), config.hidden_size)
        picked[: len(rows)] = hidden[to_device(torch.tensor(rows), self.device)]
        normed = functional.rms_norm(picked, (config.hidden_size,), unit.norm, config.norm_eps)
        return unit.head(normed)[: len(rows)].float()


def _triton_ops() -> "TritonOps":
    from services.node.engine.triton_ops import TritonOps

    return TritonOps()


class LayerStep(ABC):
    """Runs layers over one step's packed rows."""

    def run(
        self, block: int, layers: Rows[LayerUnit], hidden: torch.Tensor, kv: torch.Tensor
    ) -> None:
        """A block's layers. hidden [padded rows, hidden_size] is updated; kv: [layers, slots, 2, kv
        heads, head_dim], is added to."""
        for layer, own in zip(layers, kv, strict=True):
            self._run_layer(layer, hidden, own)

    @abstractmethod
    def _run_layer(self, layer: LayerUnit, hidden: torch.Tensor, kv: torch.Tensor) -> None: ...


class FusedLayerStep(LayerStep):
    """With the kernels for GPUs."""

    def __init__(self, model: Decoder, ops: "TritonOps", attention: "PagedStep", n: int) -> None:
        """`n`: rows that do not only pad."""
        self._ops, self._eps = ops, model.config.norm_eps
        self._experts, self._n, self._attention = model.config.experts, n, attention

    def _run_layer(self, layer: LayerUnit, hidden: torch.Tensor, kv: torch.Tensor) -> None:
        ops = self._ops
        qkv = layer.qkv(ops.rms_norm(hidden, layer.input_norm, self._eps))
        attended = self._attention.run(qkv, layer.qk_norm, kv, layer.window)
        hidden.add_(layer.o(attended))
        normed = ops.rms_norm(hidden, layer.post_norm, self._eps)
        if isinstance(layer.mlp, ExpertMlp):
            assert self._experts is not None
            add_experts(hidden, normed, self._n, layer.mlp, self._experts)
        else:
            hidden.add_(layer.mlp.down(ops.silu_times(layer.mlp.gate_up(normed))))


class PlainLayerStep(LayerStep):
    """With torch's operators, into buffers that are used by one layer after another."""

    def __init__(self, model: Decoder, attention: AttentionStep, n: int, n_padded: int) -> None:
        """`n`: rows that do not only pad."""
        config = model.config
        self._shape, self._eps = (config.hidden_size,), config.norm_eps
        self._experts = config.experts
        self._n, self._attention = n, attention
        self._qkv, self._attended = attention.qkv, attention.attended
        if model.dtype != model.attention.dtype:
            self._qkv = torch.empty_like(self._qkv, dtype=model.dtype)
            self._attended = torch.empty_like(self._attended, dtype=model.dtype)
        shape = (n_padded, 2 * config.intermediate_size)
        self._gate_up = torch.empty(shape, dtype=model.dtype, device=model.device)
        self._gate, self._up = self._gate_up.chunk(2, dim=1)
        self._active = torch.empty_like(self._up, memory_format=torch.contiguous_format)
        self._sigmoid = torch.empty_like(self._active, dtype=torch.float32)

    def _run_layer(self, layer: LayerUnit, hidden: torch.Tensor, kv: torch.Tensor) -> None:
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
