"""Layers of a decode step of few rows on a GPU, with fewer launches.

The time of such a step is that of reading the weights. cuBLAS reads the large matrices as fast as
memory allows, the smaller ones less so; and between two kernels a GPU idles for a microsecond. So
what comes before a product (the norm) and after it (bias, activation, residual) is done by the
kernel of the product.
"""

import torch
from torch import Tensor

from services.node.engine import triton_kernels as kernels
from services.node.engine.decoder import LayerStep
from services.node.engine.linear import Linear, Stored, StoredGate
from services.node.engine.paged_attention import LEAST_ROWS
from services.node.engine.weights import ExpertMlp, LayerUnit

MOST_ROWS = 16
COLUMNS = 16
DEPTH_BYTES = 512
"""Bytes of a row of the matrix that a program reads at a time."""
WARPS, STAGES = 2, 4


class FewRowsStep(LayerStep):
    """Of at most MOST_ROWS rows, without adapters. Not for float16, whose range does not hold what
    the norm multiplies before it divides."""

    def _run_layer(self, layer: LayerUnit, hidden: Tensor, kv: Tensor) -> None:
        qkv = normed_product(hidden, layer.input_norm, self._eps, _stored(layer.qkv))
        attended = self._attention.run(qkv, layer.qk_norm, kv, layer.window)
        add_product(attended, _stored(layer.o), hidden)
        if isinstance(layer.mlp, ExpertMlp):
            assert self._experts is not None
            normed = self._ops.rms_norm(hidden, layer.post_norm, self._eps)
            self._add_experts(hidden, normed, layer.mlp, self._experts)
            return
        assert isinstance(layer.mlp.gate_up, StoredGate)
        gated = gated_product(hidden, layer.post_norm, self._eps, layer.mlp.gate_up)
        add_product(gated, _stored(layer.mlp.down), hidden)


def runs(rows: int, dtype: torch.dtype) -> bool:
    return rows <= MOST_ROWS and dtype != torch.float16


def normed_product(x: Tensor, norm: Tensor, eps: float, matrix: Stored) -> Tensor:
    """The product of x's RMS norm, [rows, out]."""
    out = x.new_empty(len(x), len(matrix.weight))
    _multiply(x, matrix, out, norm=norm, eps=eps)
    return out


def gated_product(x: Tensor, norm: Tensor, eps: float, gate: StoredGate) -> Tensor:
    """silu(gate) x up of x's RMS norm, [rows, out / 2]."""
    matrix = gate.gate_up
    out = x.new_empty(len(x), len(matrix.weight) // 2)
    _multiply(x, matrix, out, norm=norm, eps=eps, gated=True)
    return out


def add_product(x: Tensor, matrix: Stored, to: Tensor) -> None:
    """Adds the product to `to` [rows, out]."""
    _multiply(x, matrix, to, added=True)


def _multiply(
    x: Tensor,
    matrix: Stored,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    added: bool = False,
) -> None:
    (rows, width), columns, bias = x.shape, out.shape[1], matrix.bias
    depth = DEPTH_BYTES // x.itemsize
    kernels.multiply_few[-(-columns // COLUMNS),](
        x,
        x if norm is None else norm,
        eps,
        matrix.weight,
        x if bias is None else bias,
        out,
        rows,
        width,
        columns,
        NORMED=norm is not None,
        GATED=gated,
        BIASED=bias is not None,
        ADDED=added,
        EVEN=width % depth == 0 and columns % COLUMNS == 0,
        ROWS=LEAST_ROWS,
        COLUMNS=COLUMNS,
        DEPTH=depth,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _stored(matrix: Linear) -> Stored:
    assert isinstance(matrix, Stored)
    return matrix
