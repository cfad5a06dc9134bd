"""Runs a step's layers with our kernels for CPUs. In one call all threads go together through the
layers of as many blocks as there is time for.

A call for each part of a layer would take as long as the part itself, for Python and for waking
threads.
"""

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, takewhile
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.adapters import Adapter
from services.node.engine.attention import Attention
from services.node.engine.base import Bell
from services.node.engine.experts import AddExperts, add_experts, add_shared_experts
from services.node.engine.linear import Packed
from services.node.engine.ops import TorchOps
from services.node.engine.rope import Rotations
from services.node.engine.share import WHOLE
from services.node.engine.step import StepPlan
from services.node.engine.team import Team
from services.node.engine.weights import ExpertMlp, LayerUnit
from shared.ids import ModelId

ALIGN = 64


class Workspace:
    """Memory for buffers that live no longer than a step. Its pages stay with the process, so that
    the operating system need not zero them for every step."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def take(self, *sizes: int) -> list[int]:
        """Returns the address of a buffer for each of `sizes`, in bytes. The buffers lie one after
        the other in `memory`, and overwrite those of the call before."""
        ends = [*accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        if len(self.memory) < ends[-1]:
            self.memory = torch.empty(ends[-1], dtype=torch.uint8)
        first = self.memory.data_ptr()
        return [first, *(first + end for end in ends[:-1])]


class KernelOps(TorchOps):
    def __init__(self, compiled: kernels.Kernels) -> None:
        self._compiled = compiled

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        (rows, width), out = x.shape, torch.empty_like(x)
        norm = kernels.Norm(
            rows=rows, width=width, narrow=x.dtype == torch.bfloat16, eps=eps,
            x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip
        self._compiled.run(norm, kernels.threads_for(rows, 4 * width))
        return out

    def look_up(self, table: Tensor, ids: Sequence[int]) -> Tensor:
        rows, width = len(ids), table.shape[1]
        numbers, out = array("q", ids), torch.empty(rows, width, dtype=table.dtype)
        lookup = kernels.Lookup(
            rows=rows, nbytes=width * table.itemsize,
            table=table.data_ptr(), ids=_address(numbers), out=out.data_ptr(),
        )  # fmt: skip
        self._compiled.run(lookup, kernels.threads_for(rows, width))
        return out

    def largest_ids(self, logits: Tensor) -> Tensor:
        (rows, width), ids = logits.shape, torch.empty(len(logits), dtype=torch.int64)
        largest = kernels.Largest(rows=rows, width=width, x=logits.data_ptr(), ids=ids.data_ptr())
        self._compiled.run(largest, kernels.threads_for(rows, width))
        return ids


class Steppable(Protocol):
    """What a step has to know of its decoder."""

    config: ModelConfig
    dtype: torch.dtype
    attention: Attention
    rotations: Rotations
    adapters: Mapping[ModelId, Adapter]
    team: Team | None
    """The ranks that run the step together; None: this process runs it alone."""
    given: WeakKeyDictionary[LayerUnit, kernels.Layer]
    """Layers as the kernels take them. They are made by the first step that runs them."""


class KernelStep:
    """Implements services.node.engine.step.Step. All matrices of the layers are Packed. Each page
    of a layer's cache is one piece of memory, whose inner order is attention.c's own."""

    def __init__(
        self,
        decoder: Steppable,
        compiled: kernels.Kernels,
        workspace: Workspace,
        plan: StepPlan,
    ) -> None:
        config, a, team = decoder.config, decoder.attention, decoder.team
        self._compiled, self._experts, self._given = compiled, config.experts, decoder.given
        share = team.share if team else WHOLE
        heads, own = len(share.heads(a.n_heads)), share.heads(a.n_kv_heads)
        rows = plan.rows
        width = config.hidden_size
        self._threads = kernels.threads_for(rows * width, width)
        narrow = decoder.dtype == torch.bfloat16
        # Pairs and tiles are of bfloat16. Without them, activations inside a layer stay in float32.
        inner = torch.bfloat16 if narrow and compiled.way != kernels.VECTORS else torch.float32
        sizes = (
            rows * width * inner.itemsize,
            rows * (heads + 2 * len(own)) * a.head_dim * inner.itemsize,
            rows * heads * a.head_dim * torch.float32.itemsize,
            self._threads * plan.scratch * torch.float32.itemsize,
        )
        read = (rows * a.q_size * inner.itemsize, rows * config.intermediate_size * inner.itemsize)
        if team is None:
            normed, qkv, queries, scores, attended, gated = workspace.take(*sizes, *read)
        else:
            normed, qkv, queries, scores = workspace.take(*sizes)
            per_token = config.experts.per_token if config.experts else 0
            added = rows * per_token * width * torch.float32.itemsize
            hidden, *others = team.take(rows * width * decoder.dtype.itemsize, *read, added)
            self.hidden = hidden.view(decoder.dtype).view(rows, width)
            attended, gated = (each.data_ptr() for each in others[:2])
            room = others[2].view(torch.float32).view(-1, width)
        # What the experts take lies first in the workspace's memory; this keeps it alive, too.
        self._normed = (workspace.memory, inner)
        self._add_experts: AddExperts = add_experts
        if team is not None:
            self._add_experts = partial(add_shared_experts, team=team, room=room)
        cos, sin = decoder.rotations.until(plan.longest)
        # The kernels know these only by address: this keeps the memory alive.
        self._kept: tuple[object, ...] = (cos, sin, plan, team)
        attention = kernels.Attention(
            rows=rows, heads=heads, kv_heads=len(own), head_dim=a.head_dim,
            page_heads=a.n_kv_heads, first_head=own.start,
            narrow=inner == torch.bfloat16, narrow_kv=a.dtype == torch.bfloat16,
            eps=a.norm_eps, scale=a.scale, cos=cos.data_ptr(), sin=sin.data_ptr(),
            queries=queries, spans=_address(plan.spans), pages=_address(plan.pages),
            n_spans=plan.n_spans, scratch=scores, scratch_size=plan.scratch,
        )  # fmt: skip
        self._attention = attention
        self._layers = kernels.Layers(
            threads=self._threads, width=width, narrow=narrow, eps=config.norm_eps,
            attention=ctypes.addressof(attention), normed=normed, qkv=qkv,
            attended=attended, gated=gated,
            wait=compiled.barrier if self._threads > 1 else None,
            team=team.address if team else None, rank=share.rank,
        )  # fmt: skip
        self._adapters = [decoder.adapters[name] for name in plan.adapters]
        if self._adapters:
            self._adapt(plan)

    def _adapt(self, plan: StepPlan) -> None:
        """Tells the kernels which rows have adapters."""
        stride = max(adapter.stride for adapter in self._adapters)
        low = torch.empty(plan.rows, stride)
        self._kept = (*self._kept, low)
        call = self._layers
        call.whose, call.low, call.stride = _address(plan.whose), low.data_ptr(), stride
        call.n_adapters = len(self._adapters)

    def run(
        self,
        block: int,
        blocks: Iterable[Sequence[LayerUnit]],
        hidden: Tensor,
        kv: Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        first, *others = blocks
        if not _is_plain(first):
            self._run_with_experts(first, hidden, kv)
            return 1
        plain = [first, *takewhile(_is_plain, others)]
        stops = [*accumulate(map(len, plain))]
        return self._call([*chain(*plain)], stops, hidden, kv, for_s, bell)

    def _run_with_experts(self, layers: Sequence[LayerUnit], hidden: Tensor, kv: Tensor) -> None:
        """Layers are collected for one call. A layer with experts ends it, because torch runs the
        experts."""
        memory, inner = self._normed
        normed = memory[: hidden.numel() * inner.itemsize].view(inner).view(hidden.shape)
        first = 0
        for last, layer in enumerate(layers, start=1):
            if isinstance(layer.mlp, ExpertMlp) or last == len(layers):
                self._call(layers[first:last], [last - first], hidden, kv[first:])
                first = last
            if isinstance(layer.mlp, ExpertMlp):
                assert self._experts is not None
                self._add_experts(hidden, normed, layer.mlp, self._experts)

    def _call(
        self,
        layers: Sequence[LayerUnit],
        stops: Sequence[int],
        hidden: Tensor,
        kv: Tensor,
        for_s: float = 0.0,
        bell: Bell | None = None,
    ) -> int:
        """`stops`: for each block the number of layers up to its end."""
        given = (ctypes.c_void_p * len(layers))(*map(self._address, layers))
        ends = (ctypes.c_int64 * len(stops))(*stops)
        added = (ctypes.c_void_p * (len(layers) * len(self._adapters)))(
            *(_given_by(adapter, layer) for layer in layers for adapter in self._adapters)
        )
        call = self._layers
        call.adapters = ctypes.addressof(added)
        call.hidden, call.seconds = hidden.data_ptr(), for_s
        call.rung = bell.address if bell else None
        call.layers, call.stops = ctypes.addressof(given), ctypes.addressof(ends)
        call.n_blocks = len(stops)
        call.kv, call.kv_step = kv.data_ptr(), kv.stride(0) * kv.itemsize
        self._compiled.run(call, self._threads)
        return int(call.ran)

    def _address(self, layer: LayerUnit) -> int:
        """The address of the layer as the kernels take it."""
        given = self._given.get(layer)
        if given is None:
            given = self._given[layer] = _layer(layer)
        return ctypes.addressof(given)


def _address(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]


def _given_by(adapter: Adapter, layer: LayerUnit) -> int | None:
    """The address of what the adapter adds in the layer."""
    given = adapter.given.get(layer.number)
    return None if given is None else given.address


def _is_plain(layers: Sequence[LayerUnit]) -> bool:
    return not any(isinstance(layer.mlp, ExpertMlp) for layer in layers)


def _layer(layer: LayerUnit) -> kernels.Layer:
    made = kernels.Layer(
        input_norm=layer.input_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        qkv=_matrix(layer.qkv),
        o=_matrix(layer.o),
        window=layer.window,
    )
    if layer.qk_norm is not None:
        made.qk_norm = layer.qk_norm.data_ptr()
    if not isinstance(layer.mlp, ExpertMlp):
        made.gate_up, made.down = _matrix(layer.mlp.gate_up), _matrix(layer.mlp.down)
    return made


def _matrix(held: object) -> int:
    assert isinstance(held, Packed)
    return held.matrix
