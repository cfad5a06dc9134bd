"""Compiles the GPU's kernels, which needs no GPU: `python -m ...compile_kernels 80 90` (compute
capabilities). Prints for each the largest number of bytes of shared memory that a program takes.

What is compiled is what the engine launches: its steps are run on a CPU, with kernels that only
note how they are called. It has a process of its own because in the tests' kernels are interpreted,
not compiled.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.node.checkpoints.config import ExpertsConfig
from services.node.engine import device_sampling, one_row, triton_experts
from services.node.engine import triton_kernels as kernels
from services.node.engine.attention import Attention
from services.node.engine.linear import Stored, StoredGate, linear
from services.node.engine.ops import TorchOps
from services.node.engine.paged_attention import paged_step
from services.node.engine.triton_ops import TritonOps
from services.node.engine.weights import ExpertMlp
from shared.messages.serving import Sampling
from tests.support.amounts import cases
from tests.unit.node.engine.paged import CAPACITY, LONGEST, config, spans_of

Shape = tuple[torch.dtype, tuple[int, int, int]]
"""The type of the weights, and (heads, KV heads, head_dim)."""
LLAMA: Shape = (torch.bfloat16, (32, 8, 128))
"""Llama-3-8B's."""
SHAPES = cases(
    [LLAMA],
    thorough=[(torch.float16, (8, 1, 256)), (torch.float32, (28, 4, 128))],
)
KERNELS = (
    *("rotate_and_store", "attend", "combine", "silu_times", "rms_norm"),
    *("multiply_by_expert", "multiply_row", "draw_token"),
)
STEPS = ([(40, 1), (3, 1)], [(9, 8), (40, 1)], [(0, 70), (9, 1)])
"""(positions before, count) of each sequence: decode steps, drafts, a prefill."""
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")

Source = tuple[ASTSource, dict[str, int]]


class Noted:
    """Stands for a kernel, and notes how it is launched."""

    def __init__(self, kernel: Any, sources: dict[str, Source]) -> None:
        self._kernel, self._sources = kernel, sources

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(self._kernel.arg_names, args, strict=False)) | named
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        aligned: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self._kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
                if not parameter.do_not_specialize_on_alignment:
                    aligned[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    aligned[(index,)] = [["tt.divisibility", 16]]
        name = f"{self._kernel.__name__} {signature} {constants} {options}"
        self._sources[name] = ASTSource(self._kernel, signature, constants, aligned), options


def sources() -> Iterator[tuple[str, Source]]:
    found: dict[str, Source] = {}
    for name in KERNELS:
        setattr(kernels, name, Noted(getattr(kernels, name), found))
    for dtype, (heads, kv_heads, dim) in SHAPES:
        attend(dtype, heads, kv_heads, dim)
        mix(dtype, 512)
        multiply_row(dtype)
    device_sampling.draw(torch.zeros(1, 1000), [0], [Sampling(temperature=1.0)], [0.5])
    yield from found.items()


def attend(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    shape = config(heads, kv_heads, dim, window=64)
    attention = Attention(shape, LONGEST, dtype, torch.device("cpu"))
    frequencies = torch.ones(dim // 2)
    kv = torch.zeros(CAPACITY, 2, kv_heads, dim, dtype=dtype)
    norm = torch.ones(heads + kv_heads, dim, dtype=dtype)
    for number, lengths in enumerate(STEPS):
        spans = spans_of(lengths, random.Random(0))
        rows = sum(count for _, count in lengths)
        qkv = torch.zeros(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        step = paged_step(attention, frequencies, spans)
        step.run(qkv, norm if number else None, kv, 64 if number else 0)
    TritonOps().silu_times(torch.zeros(4, 2 * 14336, dtype=dtype))
    TritonOps().rms_norm(torch.zeros(4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), 1e-5)


def multiply_row(dtype: torch.dtype) -> None:
    x, norm = torch.zeros(1, 512, dtype=dtype), torch.zeros(512, dtype=dtype)
    matrix = Stored(torch.zeros(64, 512, dtype=dtype), None)
    one_row.normed_product(x, norm, 1e-5, matrix)
    one_row.gated_product(x, norm, 1e-5, StoredGate(matrix, TorchOps().silu_times))
    one_row.add_product(x, matrix, torch.zeros(1, 64, dtype=dtype))


def mix(dtype: torch.dtype, rows: int) -> None:
    """Mixtral's experts and choice, narrower."""
    config = ExpertsConfig(8, 2, 256, True, {})
    x = torch.zeros(rows, 128, dtype=dtype)
    gate_up, down = x.new_zeros(8, 512, 128), x.new_zeros(8, 128, 256)
    router = linear(torch.zeros(8, 128), None, "stored")
    mlp = ExpertMlp(router, range(0), (), (), (gate_up, down))
    triton_experts.add_experts(x, x, mlp, config)


def main(capabilities: Sequence[int]) -> None:
    programs = list(sources())
    for capability in capabilities:
        target, most = GPUTarget("cuda", capability, 32), 0
        for name, (source, options) in programs:
            shared = triton.compile(source, target=target, options=options).metadata.shared
            print(shared, name, file=sys.stderr)
            most = max(most, shared)
        print(most)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
