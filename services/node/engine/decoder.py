"""The decoder, unit by unit: embedding, layers, and final norm with the head.

services.node.checkpoints.families describes how each family of models differs from Llama.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine.adapters import Adapted, Adapter, adapted
from services.node.engine.attention import Attention, Span
from services.node.engine.base import Row, Weights
from services.node.engine.collective import Group
from services.node.engine.copies import to_device
from services.node.engine.experts import AddExperts, add_experts
from services.node.engine.huge_pages import Pages
from services.node.engine.kernel_step import KernelOps, KernelStep, Workspace
from services.node.engine.kernels import Kernels, Layer
from services.node.engine.layer_step import LayerStep
from services.node.engine.linear import Form
from services.node.engine.ops import Attends, Ops, TorchOps
from services.node.engine.rope import Rotations, inverse_frequencies
from services.node.engine.share import WHOLE, Share
from services.node.engine.sliced import SlicedTensors, sum_experts
from services.node.engine.step import Step, StepPlan, plan_step
from services.node.engine.team import Team
from services.node.engine.weights import (
    DecoderTensors,
    EmbeddingUnit,
    HeadUnit,
    LayerUnit,
    Unit,
)
from shared.errors import BadInput
from shared.ids import ModelId
from shared.layout import BlockSpec
from shared.messages.serving import Pooling


def kv_dtype(dtype: torch.dtype, kernels: bool) -> torch.dtype:
    """The dtype of the KV cache of a model in `dtype`. Without kernels of our own (`kernels`) it is
    float32, because torch multiplies bf16 matrices as small as attention's slowly on a CPU."""
    return dtype if kernels else torch.float32


def gpu_ops() -> Ops:
    from services.node.engine.triton_ops import TritonOps  # Triton is not installed everywhere

    return TritonOps()


def gpu_experts() -> AddExperts:
    """The GPU's version of `add_experts`."""
    from services.node.engine import triton_experts  # Triton is not installed everywhere

    return triton_experts.add_experts


class Decoder:
    """The parts that all steps of a model share."""

    keeps_kv = True

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        longest: int,
        *,
        fused: bool = False,
        compiled: Kernels | None = None,
        adapters: Mapping[ModelId, Adapter] | None = None,
        team: Team | None = None,
        group: Group | None = None,
    ) -> None:
        """`fused`: use the Triton kernels for GPUs. `compiled`: use these kernels for CPUs.
        `adapters`: all that rows may name; it may grow. `team`: those who run the model together,
        each its share, with `compiled`. `group`: the same, each on a device of its own."""
        self.config, self.dtype, self.device = config, dtype, device
        self.team, self.group = team, group
        self._compiled, self._workspace = compiled, Workspace()
        self.given: WeakKeyDictionary[LayerUnit, Layer] = WeakKeyDictionary()
        self._fused = fused
        self.ops: Ops = gpu_ops() if fused else KernelOps(compiled) if compiled else TorchOps()
        self.add_experts = gpu_experts() if fused else add_experts
        cached, own = kv_dtype(dtype, fused or compiled is not None), config
        if group is not None:
            self.add_experts = sum_experts(self.add_experts, group)
            heads, kv_heads = (n // group.share.of for n in (config.n_heads, config.n_kv_heads))
            own = replace(config, n_heads=heads, n_kv_heads=kv_heads)
        self.attention = Attention(own, longest, cached, device)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        self.rotations = Rotations(self.frequencies)
        self.adapters: Mapping[ModelId, Adapter] = adapters if adapters is not None else {}

    @property
    def weights_at(self) -> torch.device:
        """Where the bytes of blocks lie that `units` takes."""
        return self.device if self.group is None else torch.device("cpu")

    def refusal(self, row: Row) -> str:
        return (
            "a decoder's first state depends on nothing else" if row.pooling is Pooling.CLS else ""
        )

    def units(
        self, spec: BlockSpec, weights: Weights, form: Form, pages: Pages | None = None
    ) -> tuple[Unit, ...]:
        if self.group is not None:
            tensors = SlicedTensors(spec, weights, self.ops.silu_times, self.group)
            return _units(self.config, spec, tensors)
        share = self.team.share if self.team else WHOLE
        return units(self.config, spec, weights, form, self.ops, pages, share)

    def embed(self, unit: EmbeddingUnit, rows: Sequence[Row]) -> torch.Tensor:
        """Returns [positions of the rows, hidden_size] in new memory. BadInput unless each position
        has a token. The sweep has checked that the vocabulary has them."""
        n, tokens = sum(row.count for row in rows), [token for row in rows for token in row.tokens]
        if len(tokens) != n:
            raise BadInput(f"{len(tokens)} tokens for {n} positions")
        return to_device(self.ops.look_up(unit.table, tokens), self.device)

    def step(self, spans: Sequence[Span]) -> Step:
        """A step over these rows. Only one step may be in use at a time."""
        if self._compiled is not None:
            return self.planned(plan_step(spans, self.attention.group))
        attention = self.ops.attention(self.attention, self.frequencies, spans)
        rows = sum(count for _, _, count in spans)
        return self.layer_step(attention, rows, adapted(self.adapters, spans))

    def layer_step(
        self, attention: Attends, rows: int, adapters: Adapted | None = None
    ) -> LayerStep:
        """A step of this many rows that torch or the kernels for GPUs run."""
        if self._fused and rows == 1 and adapters is None and self.group is None:
            from services.node.engine.one_row import OneRowStep  # needs Triton

            return OneRowStep(self, attention)
        return LayerStep(self, attention, adapters)

    def planned(self, plan: StepPlan) -> KernelStep:
        assert self._compiled is not None
        return KernelStep(self, self._compiled, self._workspace, plan)

    def head(self, unit: HeadUnit, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [len(rows), vocab] in float32, computed from the given rows of hidden [n,
        hidden_size]."""
        return unit.head(self.states(unit, hidden, rows), torch.float32)

    def states(self, unit: HeadUnit, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if list(rows) != [*range(len(hidden))]:  # in decode steps all rows are wanted
            hidden = hidden[to_device(torch.tensor(rows), self.device)]
        return self.ops.rms_norm(hidden, unit.norm, self.config.norm_eps)

    def largest_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return self.ops.largest_ids(logits)


def units(
    config: ModelConfig,
    spec: BlockSpec,
    weights: Weights,
    form: Form,
    ops: Ops,
    pages: Pages | None = None,
    share: Share = WHOLE,
) -> tuple[Unit, ...]:
    """A block's units. Packed matrices are taken of `pages` in the same order every time."""
    return _units(config, spec, DecoderTensors(spec, weights, form, ops.silu_times, pages, share))


def _units(config: ModelConfig, spec: BlockSpec, tensors: DecoderTensors) -> tuple[Unit, ...]:
    numbers = range(spec.first_unit, spec.last_unit + 1)
    return tuple(tensors.unit(config, number) for number in numbers)
