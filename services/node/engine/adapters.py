"""LoRA adapters as the engine computes with them: b (a x) is added to products of a base's layers
(Hu et al. 2021, section 4), in float32, whatever the base's dtype is.

Rows of several adapters and of none share a step. What a row gets does not depend on the others:
kernels add it row by row while the base's product is still in float32 (products.c), and torch row
group by row group.

A product that several modules share (q, k and v; gate and up) has one pair of matrices: `a` has the
rows of all modules, and `b` is zero where an output is not of the row's module.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from services.node.checkpoints.adapter import A, B, linear_shapes
from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.attention import Span
from services.node.engine.base import Weights
from services.node.engine.linear import PANEL, linear
from services.node.engine.weights import BlockTensors
from shared.ids import ModelId
from shared.layout import Manifest

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The modules of a layer that share a product, by the place of that product."""
assert tuple(FUSED) == kernels.PLACES


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one product."""

    a: Tensor
    """[rank, in], float32. The rank is a multiple of kernels.TOGETHER."""
    b: Tensor
    """[out, rank], float32, scaled."""

    def to(self, device: torch.device) -> "LowRank":
        return LowRank(self.a.to(device), self.b.to(device))

    def delta(self, x: Tensor) -> Tensor:
        """[rows, out] in float32."""
        low = linear(self.a, None, "stored")(x.float())
        return linear(self.b, None, "stored")(low)


@dataclass(frozen=True, slots=True)
class GivenLayer:
    """What is added in one layer, as the kernels take it."""

    places: ctypes.Array[kernels.LowRank]
    kept: tuple[Tensor, ...]
    """The matrices, which the kernels know by address."""

    @property
    def address(self) -> int:
        return ctypes.addressof(self.places)


@dataclass(frozen=True, slots=True)
class Adapter:
    base: ModelId
    stride: int
    """The largest rank of its products."""
    layers: Mapping[int, Mapping[str, LowRank]]
    """What is added, by the number of the layer and the place. Empty if kernels run the base."""
    given: Mapping[int, GivenLayer]
    """The same, for the kernels."""


def read_adapter(
    manifest: Manifest,
    weights: Weights,
    config: ModelConfig,
    device: torch.device,
    *,
    compiled: bool,
) -> Adapter:
    """`weights`: the bytes of the adapter's block, which are verified, and may be reused
    afterwards. `compiled`: whether the base runs on the kernels for CPUs."""
    tensors = _Tensors(manifest.blocks[0], weights, "stored")
    found = tensors.scaled(float(manifest.config["scaling"]))
    shapes = linear_shapes(config)
    layers: dict[int, dict[str, LowRank]] = {}
    for layer in range(config.n_layers):
        for place, targets in FUSED.items():
            low = _fused([f"model.layers.{layer}.{target}" for target in targets], found, shapes)
            if low is not None:
                layers.setdefault(layer, {})[place] = low.to(device)
    base = ModelId(str(manifest.config["base"]))
    stride = max(len(low.a) for places in layers.values() for low in places.values())
    if compiled:
        return Adapter(base, stride, {}, {i: _given(places) for i, places in layers.items()})
    return Adapter(base, stride, layers, {})


class _Tensors(BlockTensors):
    def scaled(self, scaling: float) -> dict[str, Tensor]:
        """All tensors in float32, in new memory. Those of `b` are scaled."""
        return {
            name: self._view(spec).float().cpu().clone() * (scaling if name.endswith(B) else 1.0)
            for name, spec in self._specs.items()
        }


def _fused(
    modules: Sequence[str], found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]]
) -> LowRank | None:
    """The one pair of the modules that share a product. None: the adapter has none of them."""
    present = [module for module in modules if module + A in found]
    if not present:
        return None
    a = torch.cat([found[module + A] for module in present])
    b = torch.zeros(sum(shapes[module][0] for module in modules), len(a))
    first, at = 0, 0
    for module in modules:
        outputs = shapes[module][0]
        if module in present:
            own = found[module + B]
            b[first : first + outputs, at : at + own.shape[1]] = own
            at += own.shape[1]
        first += outputs
    spare = -len(a) % kernels.TOGETHER
    return LowRank(functional.pad(a, (0, 0, 0, spare)), functional.pad(b, (0, spare)))


def _given(places: Mapping[str, LowRank]) -> GivenLayer:
    given = (kernels.LowRank * len(kernels.PLACES))()
    kept: list[Tensor] = []
    for i, place in enumerate(kernels.PLACES):
        if (low := places.get(place)) is not None:
            a, b = low.a.contiguous(), _panels(low.b, gated=place == "gate_up")
            kept += [a, b]
            given[i] = kernels.LowRank(rank=len(a), a=a.data_ptr(), b=b.data_ptr())
    return GivenLayer(given, tuple(kept))


def _panels(b: Tensor, *, gated: bool) -> Tensor:
    """[panels, rank, PANEL] from [out, rank]; outputs as in the panels of the base's matrix
    (products.c). A panel of a gated matrix has half gates, half outputs."""
    halves = 2 if gated else 1
    rank, each = b.shape[1], PANEL // halves
    parts = b.view(halves, -1, rank)
    parts = functional.pad(parts, (0, 0, 0, -parts.shape[1] % each))
    panels = parts.view(halves, -1, each, rank).permute(1, 3, 0, 2)
    return panels.reshape(-1, rank, PANEL).contiguous()


@dataclass(slots=True)
class Adapted:
    """The adapters of one step's rows."""

    adapters: list[Adapter]
    whose: list[int]
    """For each row the number of its adapter in `adapters`; -1: it has none."""
    stride: int
    _rows: list[tuple[Adapter, Tensor]] = field(default_factory=list)

    def add(self, layer: int, place: str, x: Tensor, to: Tensor) -> None:
        """Adds what the adapters add to the product of x [rows, in], to [rows, out]."""
        for low, rows in self._at(layer, place, x.device):
            to.index_add_(0, rows, low.delta(x[rows]).to(to.dtype))

    def _at(self, layer: int, place: str, device: torch.device) -> Iterator[tuple[LowRank, Tensor]]:
        """What is added at this place, with the rows that it is added to."""
        if not self._rows:
            whose = torch.tensor(self.whose, device=device)
            self._rows = [(a, (whose == i).nonzero()[:, 0]) for i, a in enumerate(self.adapters)]
        for adapter, rows in self._rows:
            if low := adapter.layers.get(layer, {}).get(place):
                yield low, rows


def adapted(adapters: Mapping[ModelId, Adapter], spans: Sequence[Span]) -> Adapted | None:
    """None: no row has an adapter. All that are named are there."""
    numbers: dict[ModelId, int] = {}
    whose: list[int] = []
    for sequence, _, count in spans:
        name = sequence.adapter
        whose += [numbers.setdefault(name, len(numbers)) if name else -1] * count
    if not numbers:
        return None
    found = [adapters[name] for name in numbers]
    return Adapted(found, whose, max(adapter.stride for adapter in found))
