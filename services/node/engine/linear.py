"""Products with a model's weights: x [rows, in] times a matrix of the checkpoint, [out, in].

A matrix is held in one of three forms. In every form a row gets the same bits in every batch
(attention.py says why that matters), except torch's own bf16 products.

- Stored: the checkpoint's bytes where they lie, without further memory, multiplied by torch. The
  form for GPUs. On a CPU, with the few rows of a decode step, torch reads them far slower than
  memory allows.
- Packed: a copy in the order in which our kernels read it (products.c). It takes as much memory
  again.
- Int8: such a copy with 8 bits for each weight and a scale for each output. Activations are not
  rounded to 8 bits, only weights are (weight-only quantisation).
"""

import ctypes
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.node.engine import kernels
from services.node.engine.attention import ROWS
from services.node.engine.huge_pages import HugePages, Pages
from services.node.engine.share import Among
from shared.errors import ConfigError, UnsupportedModel

Form = Literal["stored", "packed", "int8"]
PANEL, DEPTH = 32, 32
"""Outputs of a panel, and the multiple of inputs. A packed matrix is padded with zeros to multiples
of both."""
PITCH = 4
"""Rows for torch's products begin at multiples of this many inputs. Without its strict mode (on
AMD), MKL gives other bits to a row whose address is no multiple of 16 bytes."""
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The numbers of dtypes in kernels.h."""


class Linear(Protocol):
    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns [rows, out] in new memory, in `dtype`: float32, or None for x's own."""

    def add(self, x: Tensor, to: Tensor) -> None:
        """Adds the product to `to` [rows, out]."""


class Gate(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """Returns silu(gate) x up, [rows, out / 2], where gate and up are the two halves of the
        product."""

    def adapted(self, x: Tensor, adapt: Callable[[Tensor], None]) -> Tensor:
        """The same, with what `adapt` adds to the product [rows, out]."""


def linear(
    weight: Tensor,
    bias: Tensor | None,
    form: Form,
    pages: Pages | None = None,
    among: Among | None = None,
) -> Linear:
    """A product with `weight` [out, in] and `bias` [out]. The packed form falls back to stored
    where our kernels cannot run or do not support the dtype. `pages`: where packed weights lie, if
    not in torch's own memory. `among`: where the outputs lie if other
    ranks have others, which takes our kernels."""
    compiled = _packs(weight.dtype, form)
    if compiled is None:
        return Stored(weight, bias)
    return Packed(compiled, weight, bias, form, pages, among)


def gate(
    weight: Tensor,
    bias: Tensor | None,
    form: Form,
    silu_times: Callable[[Tensor], Tensor],
    pages: Pages | None = None,
    among: Among | None = None,
) -> Gate:
    """A gated product with `weight` [out, in], whose first half are the gates. `silu_times` is used
    in the stored form, `pages` and `among` as in `linear`."""
    compiled = _packs(weight.dtype, form)
    if compiled is None:
        return StoredGate(Stored(weight, bias), silu_times)
    return Packed(compiled, weight, bias, form, pages, among, gated=True)


def check_form(form: Form) -> None:
    """ConfigError if this machine cannot hold weights in this form."""
    if form == "int8" and kernels.load() is None:
        raise ConfigError(
            "node.cpu_weights is int8, which takes kernels that could not be compiled here: "
            "install a C compiler (apt install gcc), or set it to packed"
        )


def _packs(dtype: torch.dtype, form: Form) -> kernels.Kernels | None:
    if form == "stored" or (form == "packed" and dtype not in kernels.DTYPES):
        return None
    return kernels.load()


class Stored:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._weight = weight.t()

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        (rows, inputs), dtype = x.shape, dtype or x.dtype
        # ROWS and PITCH give a row the same bits in every batch (attention.py).
        if x.device.type == "cpu" and (rows % ROWS or inputs % PITCH):
            x = functional.pad(x, (0, -inputs % PITCH, 0, -rows % ROWS))[:, :inputs]
        if self.bias is None:
            return torch.mm(x, self._weight)[:rows].to(dtype)
        return torch.addmm(self.bias, x, self._weight)[:rows].to(dtype)

    def add(self, x: Tensor, to: Tensor) -> None:
        if x.device.type == "cpu" or self.bias is not None:
            to.add_(self(x))
        else:  # one kernel less
            to.addmm_(x, self._weight)


class StoredGate:
    def __init__(self, gate_up: Stored, silu_times: Callable[[Tensor], Tensor]) -> None:
        self.gate_up, self._silu_times = gate_up, silu_times

    def __call__(self, x: Tensor) -> Tensor:
        return self._silu_times(self.gate_up(x))

    def adapted(self, x: Tensor, adapt: Callable[[Tensor], None]) -> Tensor:
        gate_up = self.gate_up(x)
        adapt(gate_up)
        return self._silu_times(gate_up)


class Packed:
    """Implements Linear, or Gate if `gated`."""

    def __init__(
        self,
        compiled: kernels.Kernels,
        weight: Tensor,
        bias: Tensor | None,
        form: Form,
        pages: Pages | None = None,
        among: Among | None = None,
        *,
        gated: bool = False,
    ) -> None:
        dtype = weight.dtype if weight.dtype in kernels.DTYPES else torch.float32
        (outputs, inputs), narrow = weight.shape, dtype == torch.bfloat16
        held = torch.int8 if form == "int8" else dtype
        panels = -(-outputs // PANEL)
        self._compiled, self._panels, self._inputs = compiled, panels, inputs
        own = outputs // 2 if gated else outputs
        among = among or Among(0, own)
        self._width = among.pitch
        self._way = compiled.way if narrow else kernels.VECTORS
        pages = pages or HugePages(0)
        self._weight = pages.take(panels * PANEL, -(-inputs // DEPTH) * DEPTH, held)
        beside = 1, panels * PANEL, torch.float32
        self._scales = pages.take(*beside) if held == torch.int8 else None
        self._bias = None if bias is None else pages.take(*beside)
        self._matrix = kernels.Matrix(
            kind=KINDS[held], inputs=inputs, outputs=outputs, gated=gated, way=self._way,
            weight=self._weight.data_ptr(), scales=_address(self._scales),
            bias=_address(self._bias), pitch=among.pitch, first=among.first,
        )  # fmt: skip
        self.matrix = ctypes.addressof(self._matrix)
        """The address of the matrix, for the kernels."""
        if pages.filled:
            return
        weight, bias = weight.to(dtype).contiguous(), None if bias is None else bias.to(dtype)
        packing = kernels.Packing(
            narrow=narrow, matrix=self.matrix, weight=weight.data_ptr(), bias=_address(bias)
        )
        compiled.run(packing, kernels.threads_for(panels, PANEL * inputs))

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        if x.dtype == torch.float16:
            return self(x.float()).to(dtype)
        made = torch.empty(len(x), self._width, dtype=dtype)
        self.write(x, made)
        return made

    def write(self, x: Tensor, made: Tensor) -> None:
        """Writes the product to `made`, [rows, outputs of all ranks]."""
        self._run(x, made, added=False)

    def adapted(self, x: Tensor, adapt: Callable[[Tensor], None]) -> Tensor:
        """The engine takes no adapters where this would be called: see `TorchEngine.adapt`."""
        raise UnsupportedModel("a packed gate is only adapted by the kernels that run whole layers")

    def add(self, x: Tensor, to: Tensor) -> None:
        if to.dtype == torch.float16:
            to.add_(self(x))
        else:
            self._run(x, to, added=True)

    def _run(self, x: Tensor, made: Tensor, *, added: bool) -> None:
        narrow, rows = made.dtype == torch.bfloat16, len(x)
        x = x.to(torch.float32 if self._way == kernels.VECTORS else torch.bfloat16).contiguous()
        threads = kernels.threads_for(self._panels, PANEL * self._inputs * rows)
        product = kernels.Product(
            threads=threads, rows=rows, narrow=narrow, added=added,
            matrix=self.matrix, x=x.data_ptr(), made=made.data_ptr(),
        )  # fmt: skip
        self._compiled.run(product, threads)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
