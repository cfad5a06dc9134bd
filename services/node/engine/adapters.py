"""LoRA adapters as the engine computes with them: b (a x) is added to products of a base's layers
(Hu et al. 2021, section 4), in float32, whatever the base's dtype is.

Rows of several adapters and of none share a step. What a row gets does not depend on the others:
kernels add it row by row while the base's product is still in float32 (products.c), and torch row
group by row group.

What is copied here is copied by NumPy: on the thread that makes adapters, torch's operators would
wake threads that compete with the engine's.

A product that several modules share (q, k and v; gate and up) has one pair of matrices: `a` has the
rows of all modules, and `b` is zero where an output is not of the row's module.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.node.checkpoints.adapter import A, B, linear_shapes
from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.attention import Span
from services.node.engine.base import Weights
from services.node.engine.huge_pages import ALIGN, Pages
from services.node.engine.linear import linear
from services.node.engine.share import WHOLE, Share
from services.node.engine.weights import BlockTensors
from services.node.memory.recycled import Recycled
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
LANES = 16
"""Outputs that the kernels add to at a time."""


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


class GivenLayer:
    """What is added in one layer, as the kernels take it."""

    def __init__(self) -> None:
        self._places = (kernels.LowRank * len(kernels.PLACES))()
        self._kept: list[Tensor] = []
        """What the kernels know by address."""

    def put(self, place: str, a: Tensor, b: Tensor, windows: Tensor) -> None:
        self._kept += [a, b, windows]
        self._places[kernels.PLACES.index(place)] = kernels.LowRank(
            rank=len(a), a=a.data_ptr(), b=b.data_ptr(), windows=windows.data_ptr()
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._places)


@dataclass(frozen=True, slots=True)
class Adapter:
    base: ModelId
    stride: int
    """The largest rank of its products."""
    layers: Mapping[int, Mapping[str, LowRank]]
    """What is added, by the number of the layer and the place. Empty if kernels run the base."""
    given: Mapping[int, GivenLayer]
    """The same, for the kernels."""
    settle: Callable[[], None]
    """Has its memory lie in huge pages, which steps read faster. It takes tens of ms, on any
    thread."""
    others: Any = None
    """What other ranks make their shares of, until they have it (`ranks.py`)."""


def read_adapter(
    manifest: Manifest,
    weights: Weights,
    config: ModelConfig,
    device: torch.device,
    *,
    compiled: bool,
    share: Share = WHOLE,
    room: "AdapterRoom | None" = None,
) -> Adapter:
    """`weights`: the bytes of the adapter's block, which are verified, and may be reused
    afterwards. `compiled`: whether the base runs on the kernels for CPUs. `share`: whose outputs
    are wanted. `room`: where it is to lie; None: in memory of its own."""
    found = _Tensors(manifest.blocks[0], weights, "stored").named
    shapes, scaling = linear_shapes(config), float(manifest.config["scaling"])
    pages = room or AdapterRoom(manifest, Recycled())
    layers: dict[int, dict[str, LowRank]] = {}
    given: dict[int, GivenLayer] = {}
    stride = 0
    for layer in range(config.n_layers):
        for place, targets in FUSED.items():
            own = share.heads if place == "qkv" else share.outputs
            modules = [
                _module(own(shapes[name][0]), found.get(name + A), found.get(name + B))
                for name in (f"model.layers.{layer}.{target}" for target in targets)
                if name in shapes
            ]
            if not (rank := sum(module.rank for module in modules)):
                continue
            a = _stacked(modules, rank, pages)
            stride = max(stride, len(a))
            if compiled:
                known = given.setdefault(layer, GivenLayer())
                known.put(place, a, *_packed(modules, scaling, pages, gated=place == "gate_up"))
            else:
                low = LowRank(a.to(device), _dense(modules, len(a), scaling).to(device))
                layers.setdefault(layer, {})[place] = low
    return Adapter(ModelId(str(manifest.config["base"])), stride, layers, given, pages.settle)


class AdapterRoom:
    """Memory for an adapter. Implements Pages."""

    filled = False

    def __init__(self, manifest: Manifest, memory: Recycled) -> None:
        """Has the system find it. What does not fit, since ranks are rounded up, lies in torch's
        own memory."""
        nbytes = sum(4 * math.prod(tensor.shape) for tensor in manifest.blocks[0].tensors)
        lease = memory.take(nbytes + nbytes // 8)
        lease.find(nbytes)
        self._left = torch.frombuffer(lease.memory, dtype=torch.uint8)
        self.settle = partial(lease.settle, nbytes)

    def take(self, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
        nbytes = outputs * inputs * dtype.itemsize
        if len(self._left) < nbytes:
            return torch.empty(outputs, inputs, dtype=dtype)
        taken, self._left = self._left[:nbytes], self._left[-(-nbytes // ALIGN) * ALIGN :]
        return taken.view(dtype).view(outputs, inputs)


class _Tensors(BlockTensors):
    @property
    def named(self) -> dict[str, Tensor]:
        """Views of all tensors."""
        return {name: self._view(spec).cpu() for name, spec in self._specs.items()}


def _module(own: range, a: Tensor | None, b: Tensor | None) -> "_Module":
    return _Module(len(own), a, None if b is None else b[own.start : own.stop])


class _Module(NamedTuple):
    outputs: int
    a: Tensor | None
    b: Tensor | None
    """None, both: the adapter leaves the module alone."""

    @property
    def rank(self) -> int:
        return 0 if self.a is None else len(self.a)


def _stacked(modules: Sequence[_Module], rank: int, pages: Pages) -> Tensor:
    """`a` of all modules, and zeros up to a multiple of TOGETHER."""
    parts = [module.a for module in modules if module.a is not None]
    full = -(-rank // kernels.TOGETHER) * kernels.TOGETHER
    made, at = pages.take(full, parts[0].shape[1], torch.float32), 0
    for part in parts:
        np.copyto(made[at : at + len(part)].numpy(), part.float().numpy())
        at += len(part)
    made[at:] = 0
    return made


def _dense(modules: Sequence[_Module], rank: int, scaling: float) -> Tensor:
    """`b` of all modules: zero where an output is not of the rank's module."""
    made = torch.zeros(sum(module.outputs for module in modules), rank)
    first, at = 0, 0
    for module in modules:
        if module.b is not None:
            own = made[first : first + module.outputs, at : at + module.rank]
            own.copy_(module.b).mul_(scaling)
        first, at = first + module.outputs, at + module.rank
    return made


def _packed(
    modules: Sequence[_Module], scaling: float, pages: Pages, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """`b` as the kernels read it, and its windows (`LowRank` in kernels.h). A panel of a gated
    matrix has LANES gates, then the LANES outputs that they gate."""
    if not gated and any(module.outputs % LANES for module in modules[:-1]):
        rank = sum(module.rank for module in modules)
        b = _dense(modules, rank, scaling)
        modules, scaling = [_Module(len(b), b.t(), b)], 1.0
    groups = [-(-module.outputs // LANES) for module in modules]
    made = pages.take(
        sum(n * module.rank for n, module in zip(groups, modules, strict=True)),
        LANES,
        torch.float32,
    )
    windows: list[Tensor] = []
    at, first = 0, 0
    for n, module in zip(groups, modules, strict=True):
        rank = module.rank
        window = torch.zeros(n, 3, dtype=torch.int32)
        if module.b is not None:
            b = module.b.float()
            if missing := n * LANES - len(b):
                b = functional.pad(b, (0, 0, 0, missing))
            own = made[at : at + n * rank].view(n, rank, LANES)
            turned = b.view(n, LANES, rank).transpose(1, 2)
            np.multiply(turned.numpy(), np.float32(scaling), out=own.numpy())
            window[:, 0], window[:, 1] = first, rank
            window[:, 2] = torch.arange(at, at + n * rank, rank)
        windows.append(window)
        at, first = at + n * rank, first + rank
    if gated:
        return made, torch.stack(windows, dim=1).view(-1, 3).contiguous()
    joined = torch.cat(windows)
    return made, functional.pad(joined, (0, 0, 0, len(joined) % 2)).contiguous()


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


def named(spans: Sequence[Span]) -> tuple[list[ModelId], list[int]]:
    """(the adapters of a step's rows, for each row the number of its adapter, or -1)."""
    numbers: dict[ModelId, int] = {}
    whose: list[int] = []
    for sequence, _, count in spans:
        name = sequence.adapter
        whose += [numbers.setdefault(name, len(numbers)) if name else -1] * count
    return list(numbers), whose


def adapted(adapters: Mapping[ModelId, Adapter], spans: Sequence[Span]) -> Adapted | None:
    """None: no row has an adapter. All that are named are there."""
    names, whose = named(spans)
    if not names:
        return None
    found = [adapters[name] for name in names]
    return Adapted(found, whose, max(adapter.stride for adapter in found))
