"""What a decoder computes besides products with weights: by our own kernels where they can run, and
by torch's operators everywhere else. Both give a row the same bits in every batch, but not the same
as each other."""

import ctypes
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.node.core.kv import PAGE, pages_of
from services.node.engine import kernels
from services.node.engine.attention import Attention, AttentionStep, Span
from services.node.engine.rope import rotations

BLOCK = 16
"""Most rows of a sequence that one thread attends at a time."""


class Step(Protocol):
    def run(self, qkv: Tensor, qk_norm: Tensor | None, kv: Tensor, window: int) -> Tensor:
        """[rows, heads x head_dim], attended, from qkv [rows, (heads + 2 kv heads) x head_dim] of a
        layer; `qk_norm`: see LayerUnit. kv: the layer's [slots, 2, kv heads,
        head_dim], which is added to. Keys are cached rotated."""


class Ops(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Of x [rows, width] along each row."""

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """silu(gate) x up, [rows, width], of [rows, 2 x width]. (Packed weights do that by
        themselves: linear.py.)"""

    def attention(self, attention: Attention, frequencies: Tensor, spans: Iterable[Span]) -> Step:
        """One step's attention: planned once, run in every layer of the stage."""


def ops_for(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        compiled = kernels.load()
        if compiled is not None:
            return KernelOps(compiled)
    return TorchOps()


def gpu_ops() -> Ops:
    from services.node.engine.triton_ops import TritonOps  # there need be no Triton elsewhere

    return TritonOps()


class TorchOps:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """Not by the fused silu: its result depends on the place."""
        gate, up = gate_up.chunk(2, dim=1)
        grown = torch.mul(gate, -1, out=torch.empty_like(gate, dtype=torch.float32))
        grown.exp_().add_(1)
        torch.div(gate, grown, out=grown)
        return torch.mul(grown, up, out=torch.empty_like(up))

    def attention(self, attention: Attention, frequencies: Tensor, spans: Iterable[Span]) -> Step:
        return AttentionStep(attention, frequencies, tuple(spans))


class KernelOps(TorchOps):
    def __init__(self, compiled: kernels.Kernels) -> None:
        self._kernels = compiled
        self._scratch = torch.empty(0)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        argument = kernels.Norm(
            rows=rows, width=width, narrow=_narrow(x), eps=eps,
            x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(),
        )  # fmt: skip
        self.run("rms_norm", argument, rows, 4 * width)
        return out

    def attention(self, attention: Attention, frequencies: Tensor, spans: Iterable[Span]) -> Step:
        return KernelStep(self, attention, frequencies, spans)

    def run(self, name: str, argument: ctypes.Structure, items: int, each: int) -> None:
        """`each`: see kernels.threads_for."""
        self._kernels.run(name, argument, kernels.threads_for(items, each))

    def scratch(self, count: int) -> Tensor:
        """float32; what is in it is over at the next call."""
        if self._scratch.numel() < count:
            self._scratch = torch.empty(count)
        return self._scratch


class KernelStep:
    """Implements Step. A page of a layer's cache is one piece of memory, in which kernels.c has an
    order of its own."""

    def __init__(
        self,
        ops: KernelOps,
        attention: Attention,
        frequencies: Tensor,
        spans: Iterable[Span],
    ) -> None:
        a, self._ops = attention, ops
        blocks: list[tuple[int, int, int, int]] = []
        pages: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for sequence, first, count in spans:
            for done in range(0, count, BLOCK):
                n = min(BLOCK, count - done)
                blocks.append((len(slots) + done, n, first + done, len(pages)))
            pages += sequence.pages[: pages_of(first + count)]
            slots += sequence.slots(first, count)
            positions += range(first, first + count)
        # The longest first: threads that end with short ones end together.
        blocks.sort(key=lambda block: -block[1] * (block[1] + block[2]))
        self._blocks = np.array(blocks, dtype=np.int32)
        self._pages = np.array(pages, dtype=np.int32)
        self._slots = np.array(slots, dtype=np.int32)
        cos, sin = rotations(torch.tensor(positions), frequencies)
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._queries = torch.empty(len(slots), a.q_size)
        self._shape = (len(slots), a.q_size)
        seen = sum(n * (first + n) for _, n, first, _ in blocks)
        self._each = a.group * a.head_dim * seen // len(blocks)
        longest = max(pages_of(first + n) * PAGE for _, n, first, _ in blocks)
        most = max(n for _, n, _, _ in blocks)
        self._scratch_size = most * a.group * longest
        self._argument = kernels.Attention(
            rows=len(slots), heads=a.n_heads, kv_heads=a.n_kv_heads, head_dim=a.head_dim,
            eps=a.norm_eps, scale=a.scale, cos=self._cos.data_ptr(), sin=self._sin.data_ptr(),
            slots=self._slots.ctypes.data, queries=self._queries.data_ptr(),
            spans=self._blocks.ctypes.data, pages=self._pages.ctypes.data, n_spans=len(blocks),
            scratch_size=self._scratch_size,
        )  # fmt: skip

    def run(self, qkv: Tensor, qk_norm: Tensor | None, kv: Tensor, window: int) -> Tensor:
        ops, argument = self._ops, self._argument
        attended = qkv.new_empty(self._shape)
        scratch = ops.scratch(torch.get_num_threads() * self._scratch_size)
        argument.narrow, argument.window, argument.workers = _narrow(qkv), window, 0
        argument.qkv, argument.kv = qkv.data_ptr(), kv.data_ptr()
        argument.qk_norm = None if qk_norm is None else qk_norm.data_ptr()
        argument.attended, argument.scratch = attended.data_ptr(), scratch.data_ptr()
        ops.run("write_kv", argument, argument.rows, self._shape[1])
        ops.run("attend", argument, argument.n_spans * argument.kv_heads, self._each)
        return attended


def _narrow(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)
