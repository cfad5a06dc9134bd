"""Layers of a decode step of one row on a GPU, in seven launches each.

The time of such a step is that of reading the weights. cuBLAS reads the large matrices as fast as
memory allows, the smaller ones less so; and between two kernels a GPU idles for a microsecond. So
the kernel of a product also does what comes before it (the norm) and after it (bias, activation,
residual). For more rows cuBLAS is faster.
"""

from torch import Tensor

from services.node.engine import triton_kernels as kernels
from services.node.engine.layer_step import LayerStep
from services.node.engine.linear import Linear, Stored, StoredGate
from services.node.engine.weights import ExpertMlp, LayerUnit

COLUMNS, DEPTH, WARPS, STAGES = 4, 512, 1, 4
"""The fastest of those tried on an H200 for the matrices of Llama-3-8B, or nearly."""


class OneRowStep(LayerStep):
    """A step of one row, without adapters."""

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


def normed_product(x: Tensor, norm: Tensor, eps: float, matrix: Stored) -> Tensor:
    """The product of x's RMS norm, [1, out]."""
    out = x.new_empty(1, len(matrix.weight))
    _multiply(x, matrix, out, norm=norm, eps=eps)
    return out


def gated_product(x: Tensor, norm: Tensor, eps: float, gate: StoredGate) -> Tensor:
    """silu(gate) x up of x's RMS norm, [1, out / 2]."""
    out = x.new_empty(1, len(gate.gate_up.weight) // 2)
    _multiply(x, gate.gate_up, out, norm=norm, eps=eps, gated=True)
    return out


def add_product(x: Tensor, matrix: Stored, to: Tensor) -> None:
    """Adds the product to `to` [1, out]."""
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
    width, columns, bias = x.shape[1], out.shape[1], matrix.bias
    kernels.multiply_row[-(-columns // COLUMNS),](
        x,
        x if norm is None else norm,
        eps,
        matrix.weight,
        x if bias is None else bias,
        out,
        width,
        columns,
        NORMED=norm is not None,
        GATED=gated,
        BIASED=bias is not None,
        ADDED=added,
        EVEN=width % DEPTH == 0 and columns % COLUMNS == 0,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        num_warps=WARPS,
    )


def _stored(matrix: Linear) -> Stored:
    assert isinstance(matrix, Stored)
    return matrix
