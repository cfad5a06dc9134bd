"""Compiles the GPU's kernels, which needs no GPU: `python -m ...compile_kernels 80` (a compute
capability). Prints the largest number of bytes of shared memory that a program takes.

It has a process of its own because in the tests' kernels are interpreted, not compiled.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.node.engine import triton_kernels as kernels
from services.node.engine.paged_attention import MOST_SPLITS

HEADS = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128}
"""Llama-3-8B's."""


def sources() -> Iterator[tuple[ASTSource, dict[str, int]]]:
    """Each with its options, as paged_attention.py launches it."""
    values = "*bf16"
    given = {"kv": values, "qkv": values, "norm": values, "out": values, "gate_up": values}
    given |= {"tiles": "*i32", "pages": "*i32", "slots": "*i32", "splits": "i32", "width": "i32"}
    given |= {"cos": "*fp32", "sin": "*fp32", "partial": "*fp32", "weight": "*fp32"}
    given |= {"eps": "fp32", "scale": "fp32"}
    attend = {**HEADS, "PAGE": 16, "KEYS": 64, "DIM": 128}
    for constants, warps in (
        ({**attend, "WINDOW": 0, "ROWS": 16, "DIVIDED": True}, 4),
        ({**attend, "WINDOW": 4096, "ROWS": 128, "DIVIDED": False}, 8),
    ):
        yield source(kernels.attend, given, constants), {"num_warps": warps, "num_stages": 2}
    combine = {**HEADS, "ROWS": 16, "DIM": 128, "MOST_SPLITS": MOST_SPLITS}
    yield source(kernels.combine, given, combine), {}
    for normed in (False, True):
        rotate = {**HEADS, "HALF": 64, "TILE": 8, "NORMED": normed}
        yield source(kernels.rotate_and_store, given, rotate), {"num_warps": 1}
    yield source(kernels.silu_times, given, {"TILE": 1024}), {}


def source(kernel: Any, given: dict[str, str], constants: dict[str, int]) -> ASTSource:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else given[name] for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, values, aligned)


def main(capability: int) -> None:
    shared = [
        triton.compile(made, target=GPUTarget("cuda", capability, 32), options=options)
        for made, options in sources()
    ]
    print(max(compiled.metadata.shared for compiled in shared))


if __name__ == "__main__":
    main(int(sys.argv[1]))
