"""From a block's bytes to the tensors that the model computes with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.node.checkpoints.architecture import AnyConfig
from services.node.checkpoints.config import (
    DTYPES,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ModelConfig,
)
from services.node.checkpoints.families.family import DOWN, GATE_UP, ROUTER
from services.node.engine.base import Weights
from services.node.engine.huge_pages import Pages
from services.node.engine.linear import Form, Gate, Linear, gate, linear
from services.node.engine.share import WHOLE, Among, Share, cut
from shared.errors import BadInput, CorruptCheckpoint, MissingTensor, UnsupportedModel
from shared.layout import BlockSpec, Manifest, TensorSpec


@dataclass(frozen=True, slots=True)
class EmbeddingUnit:
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Gate
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    router: Linear
    """In float32, because rounding would decide between experts whose scores are nearly tied."""
    experts: range
    """Those that are here: all, unless other ranks have others."""
    gate_up: tuple[Gate, ...]
    """One for each of these experts, as in `down`."""
    down: tuple[Linear, ...]
    matrices: tuple[torch.Tensor, torch.Tensor]
    """The same weights as the checkpoint stores them: GATE_UP and DOWN (families.family)."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerUnit:
    number: int
    """Counted from 0."""
    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[heads + kv heads, head_dim]: one row for each head."""
    window: int
    """Positions that a query sees; see LayerConfig."""
    o: Linear
    post_norm: torch.Tensor
    mlp: Mlp | ExpertMlp


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm (Ba et al. 2016)."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadUnit:
    norm: torch.Tensor
    head: Linear


Unit = EmbeddingUnit | LayerUnit | HeadUnit


def check_manifest(manifest: Manifest, config: AnyConfig) -> torch.dtype:
    """The dtype of all tensors. Errors name the tensor that is missing, unknown or malformed."""
    unit = 0
    dtypes: set[str] = set()
    for block in manifest.blocks:
        if block.first_unit != unit or block.last_unit >= config.n_units:
            raise CorruptCheckpoint(
                f"manifest: block {block.index} has units {block.first_unit}-{block.last_unit}; "
                f"expected to go on at unit {unit} of {config.n_units}"
            )
        _check_block(block, config)
        dtypes |= {tensor.dtype for tensor in block.tensors}
        unit = block.last_unit + 1
    if unit != config.n_units:
        raise CorruptCheckpoint(f"manifest: ends at unit {unit} of {config.n_units}")
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise UnsupportedModel(
            f"tensors of {', '.join(sorted(dtypes))}; supported: all of one of {', '.join(DTYPES)}"
        )
    dtype: torch.dtype = getattr(torch, dtypes.pop())
    return dtype


def _check_block(block: BlockSpec, config: AnyConfig) -> None:
    expected = {
        name: shape
        for unit in range(block.first_unit, block.last_unit + 1)
        for name, shape in config.unit_tensors(unit).items()
    }
    present = {tensor.name: tensor.shape for tensor in block.tensors}
    for name, shape in expected.items():
        if name not in present:
            raise MissingTensor(f"manifest: block {block.index} lacks {name}")
        if present[name] != shape:
            raise CorruptCheckpoint(
                f"manifest: {name} has shape {present[name]}; the config says {shape}"
            )
    unknown = sorted(present.keys() - expected.keys())
    if unknown:
        raise CorruptCheckpoint(f"manifest: block {block.index} has unknown {', '.join(unknown)}")


class BlockTensors:
    """A block's tensors by name: views of its bytes, with matrices in the form that is asked
    for."""

    def __init__(
        self, block: BlockSpec, weights: Weights, form: Form, pages: Pages | None = None
    ) -> None:
        """`pages`: where packed matrices lie, if not in torch's own memory."""
        if weights.nbytes < block.nbytes:
            raise BadInput(
                f"block {block.index} has {block.nbytes} bytes; the buffer only {weights.nbytes}"
            )
        if isinstance(weights, memoryview):
            weights = torch.frombuffer(weights, dtype=torch.uint8)
        self._bytes = weights
        self._form, self._pages = form, pages
        self._specs = {tensor.name: tensor for tensor in block.tensors}

    def _linear(self, prefix: str, names: Sequence[str]) -> Linear:
        return self._formed(*self._matrix(prefix, names))

    def _matrix(
        self, prefix: str, names: Sequence[str]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix, and its bias if it has one."""
        weight = self._joined([f"{prefix}{name}.weight" for name in names])
        if f"{prefix}{names[0]}.bias" not in self._specs:
            return weight, None
        return weight, self._joined([f"{prefix}{name}.bias" for name in names])

    def _formed(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return linear(weight, bias, self._form, self._pages)

    def _norm(self, name: str) -> Norm:
        return Norm(self._joined([name + ".weight"]), self._joined([name + ".bias"]))

    def _joined(self, names: Sequence[str]) -> torch.Tensor:
        """Joins tensors that are applied to the same input: fewer and larger products.

        Manifests pack them next to each other (ModelConfig.unit_tensors), so the result is a view.
        It is a copy only if padding lies between them, after a tensor whose size is not a multiple
        of ALIGN.
        """
        specs = [self._specs[name] for name in names]
        offset, end = specs[0].offset, specs[0].offset
        for spec in specs:
            if spec.offset != end:
                return torch.cat([self._view(spec) for spec in specs])
            end += spec.nbytes
        shape = (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
        return self._view(TensorSpec(names[0], specs[0].dtype, shape, offset, end - offset))

    def _view(self, spec: TensorSpec) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        part = self._bytes[spec.offset : spec.offset + spec.nbytes]
        return part.view(dtype).view(spec.shape)


class DecoderTensors(BlockTensors):
    def __init__(
        self,
        block: BlockSpec,
        weights: Weights,
        form: Form,
        silu_times: Callable[[torch.Tensor], torch.Tensor],
        pages: Pages | None = None,
        share: Share = WHOLE,
    ) -> None:
        """`silu_times`: see ops.py. `share`: whose matrices are wanted."""
        super().__init__(block, weights, form, pages)
        self._silu_times = silu_times
        self._share = share

    def unit(self, config: ModelConfig, unit: int) -> Unit:
        if unit == 0:
            return EmbeddingUnit(self._joined([EMBEDDING]))
        if unit == config.n_units - 1:
            return HeadUnit(self._vector(FINAL_NORM), self._head(self._joined([HEAD])))
        prefix = f"model.layers.{unit - 1}."
        attention, layer = prefix + "self_attn.", config.layers[unit - 1]
        return LayerUnit(
            number=unit - 1,
            input_norm=self._vector(prefix + "input_layernorm.weight"),
            qkv=self._heads(attention, config),
            qk_norm=self._qk_norm(attention, config) if config.qk_norm else None,
            window=layer.window,
            o=self._added(
                *self._matrix(attention, ("o_proj",)),
                self._share.heads(config.n_heads * config.head_dim),
            ),
            post_norm=self._vector(prefix + "post_attention_layernorm.weight"),
            mlp=self._expert_mlp(prefix) if layer.experts else self._mlp(prefix + "mlp."),
        )

    def _vector(self, name: str) -> torch.Tensor:
        """A tensor that every rank has."""
        return self._joined([name])

    def _cut(
        self, tensor: torch.Tensor, sizes: Sequence[int], own: Sequence[range]
    ) -> torch.Tensor:
        return cut(tensor, sizes, own)

    def _qk_norm(self, prefix: str, config: ModelConfig) -> torch.Tensor:
        q, k = self._vector(prefix + "q_norm.weight"), self._vector(prefix + "k_norm.weight")
        heads = (len(self._share.heads(n)) for n in (config.n_heads, config.n_kv_heads))
        return torch.cat([norm.expand(n, -1) for norm, n in zip((q, k), heads, strict=True)])

    def _heads(self, prefix: str, config: ModelConfig) -> Linear:
        """Queries, keys and values of the share's heads."""
        whole = self._matrix(prefix, ("q_proj", "k_proj", "v_proj"))
        sizes = [n * config.head_dim for n in (config.n_heads, *2 * (config.n_kv_heads,))]
        own = [self._share.heads(size) for size in sizes]
        weight, bias = (None if each is None else self._cut(each, sizes, own) for each in whole)
        assert weight is not None
        return self._formed(weight, bias)

    def _head(self, weight: torch.Tensor) -> Linear:
        return self._divided(weight)

    def _added(self, weight: torch.Tensor, bias: torch.Tensor | None, inputs: range) -> Linear:
        """A product that is added to hidden states. `inputs`: those that this rank computes."""
        return self._divided(weight, bias)

    def _divided(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        own = self._share.outputs(len(weight))
        weight, among = weight[own.start : own.stop], Among(own.start, len(weight))
        bias = None if bias is None else bias[own.start : own.stop]
        return linear(weight, bias, self._form, self._pages, among)

    def _mlp(self, prefix: str) -> Mlp:
        weight, bias = self._matrix(prefix, ("gate_proj", "up_proj"))
        down, down_bias = self._matrix(prefix, ("down_proj",))
        inputs = self._share.outputs(down.shape[1])
        return Mlp(self._gate(weight, bias, self._share), self._added(down, down_bias, inputs))

    def _expert_mlp(self, prefix: str) -> ExpertMlp:
        gate_up, down = self._joined([prefix + GATE_UP]), self._joined([prefix + DOWN])
        own = self._share.experts(len(down))
        return ExpertMlp(
            router=linear(self._joined([prefix + ROUTER]).float(), None, "stored"),
            experts=own,
            gate_up=tuple(self._gate(gate_up[expert], None, WHOLE) for expert in own),
            down=tuple(self._formed(down[expert]) for expert in own),
            matrices=(gate_up, down),
        )

    def _gate(self, weight: torch.Tensor, bias: torch.Tensor | None, share: Share) -> Gate:
        size = len(weight) // 2
        own = share.outputs(size)
        weight = self._cut(weight, (size, size), (own, own))
        bias = None if bias is None else self._cut(bias, (size, size), (own, own))
        among = Among(own.start, size)
        return gate(weight, bias, self._form, self._silu_times, self._pages, among)
