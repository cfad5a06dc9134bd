"""Products with a small Llama's weights in every form, beside oneDNN's: ms for a pass, by number of
rows.

    python -m benchmarks.products [--rows 1,4,16,64,256] [--runs 9] [--threads 0]

All forms take turns in every run, so that a drift of the machine affects all alike. Medians are
printed.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import get_args

import torch
from torch import Tensor

from benchmarks.machine import machine
from services.node.engine.linear import Form, linear

WIDTH, INNER, VOCAB, LAYERS = 768, 2048, 32_000, 12
LAYER = ((WIDTH, 1280), (WIDTH, WIDTH), (WIDTH, 2 * INNER), (INNER, WIDTH))
SHAPES = LAYER * LAYERS + ((WIDTH, VOCAB),)
"""[in, out] of qkv, o, gate and up, and down; then of the head."""
ONEDNN = "oneDNN"

Product = Callable[[Tensor], Tensor]


def onednn(weight: Tensor) -> Product:
    """A product with the weight packed by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def products(dtype: torch.dtype) -> dict[str, list[Product]]:
    weights = [(torch.randn(outputs, inputs) * 0.05).to(dtype) for inputs, outputs in SHAPES]
    made: dict[str, list[Product]] = {
        form: [linear(weight, None, form) for weight in weights] for form in get_args(Form)
    }
    if torch._C._has_mkldnn:
        made[ONEDNN] = [onednn(weight) for weight in weights]
    return made


def measure(of: dict[str, list[Product]], dtype: torch.dtype, rows: int, runs: int) -> str:
    inputs = {width: torch.randn(rows, width).to(dtype) for width in (WIDTH, INNER)}
    seconds: dict[str, list[float]] = {name: [] for name in of}
    for _ in range(1 + runs):
        for name, ones in of.items():
            began = time.perf_counter()
            for (width, _), one in zip(SHAPES, ones, strict=True):
                one(inputs[width])
            seconds[name].append(time.perf_counter() - began)
    typical = {name: median(taken[1:]) * 1e3 for name, taken in seconds.items()}
    figures = ", ".join(f"{name} {ms:.1f} ms" for name, ms in typical.items())
    peer = typical.get(ONEDNN)
    ratio = f"; packed {peer / typical['packed']:.2f} x {ONEDNN}" if peer else ""
    return f"{dtype}, {rows} rows: {figures}{ratio}"


def main() -> None:
    summary, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--rows", default="1,4,16,64,256", help="of activations (1,4,16,64,256)")
    parser.add_argument("--runs", type=int, default=9, help="of each (9)")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(f"{machine()}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        of = products(dtype)
        for rows in map(int, arguments.rows.split(",")):
            print(measure(of, dtype, rows, arguments.runs), flush=True)


if __name__ == "__main__":
    main()
