"""Runs a step's layers one operation after the other, on any device. (On most CPUs kernel_step.py
runs them instead.)"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine.adapters import Adapted
from services.node.engine.base import Bell
from services.node.engine.experts import AddExperts
from services.node.engine.ops import Attends, Ops
from services.node.engine.weights import ExpertMlp, LayerUnit


class Layered(Protocol):
    """What a step has to know of its decoder."""

    config: ModelConfig
    ops: Ops
    add_experts: AddExperts


class LayerStep:
    """Runs layers over the packed rows of one step."""

    def __init__(self, model: Layered, attention: Attends, adapted: Adapted | None = None) -> None:
        self._ops, self._eps = model.ops, model.config.norm_eps
        self._experts, self._add_experts = model.config.experts, model.add_experts
        self._attention = attention
        self._adapted = adapted

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[LayerUnit]],
        hidden: torch.Tensor,
        kv: torch.Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        """Runs the first block's layers. Updates hidden [rows, hidden_size] and adds to kv [layers,
        slots, 2, kv heads, head_dim]."""
        self.run_layers(next(iter(blocks)), hidden, kv)
        return 1

    def run_layers(
        self, layers: Sequence[LayerUnit], hidden: torch.Tensor, kv: torch.Tensor
    ) -> None:
        for layer, own in zip(layers, kv, strict=False):  # the caches of later blocks may follow
            self._run_layer(layer, hidden, own)

    def _run_layer(self, layer: LayerUnit, hidden: torch.Tensor, kv: torch.Tensor) -> None:
        ops = self._ops
        normed = ops.rms_norm(hidden, layer.input_norm, self._eps)
        qkv = layer.qkv(normed)
        self._adapt(layer, "qkv", normed, qkv)
        attended = self._attention.run(qkv, layer.qk_norm, kv, layer.window)
        layer.o.add(attended, hidden)
        self._adapt(layer, "o", attended, hidden)
        normed = ops.rms_norm(hidden, layer.post_norm, self._eps)
        if isinstance(layer.mlp, ExpertMlp):
            assert self._experts is not None
            self._add_experts(hidden, normed, layer.mlp, self._experts)
            return
        if self._adapted is None:
            gated = layer.mlp.gate_up(normed)
        else:
            gated = layer.mlp.gate_up.adapted(
                normed, lambda product: self._adapt(layer, "gate_up", normed, product)
            )
        layer.mlp.down.add(gated, hidden)
        self._adapt(layer, "down", gated, hidden)

    def _adapt(self, layer: LayerUnit, place: str, x: torch.Tensor, product: torch.Tensor) -> None:
        if self._adapted is not None:
            self._adapted.add(layer.number, place, x, product)
