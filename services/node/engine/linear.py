"""Products with a model's weights: x [rows, in] times a matrix of the checkpoint, [out, in].

A matrix is held in one of three forms. In all of them a row of fp32 gets the same bits in every
batch (attention.py says why that matters), as measured for all numbers of rows from 2 to 640. A row
of bf16 does not: on CPUs that multiply bf16 (AVX-512, AMX) many rows go another way than few, and
now and then a last bit is another.

- Stored: where the checkpoint's bytes lie, at no memory. MKL's products with the few rows of a
  decode step stay far below the rate at which memory is read: it is the form for GPUs.
- Packed: a copy in the order in which oneDNN reads it, for as much memory again. With few rows it
  is 1.3 to 1.7 times as fast, with many somewhat faster too (benchmarks/RESULTS.md).
- Int8: a copy with 8 bits a weight, each output's with a scale of its own, and activations rounded
  to 8 bits row by row (as Dettmers et al., "LLM.int8()", 2022, section 3.1, without its outliers).
  Sums of integers are exact: so rows have the same bits in every batch whatever the dtype.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from shared.errors import ConfigError

Form = Literal["stored", "packed", "int8"]


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[rows, out] in x's dtype, in new memory."""


def linear(weight: Tensor, bias: Tensor | None, form: Form) -> Linear:
    """`weight` [out, in], `bias` [out]. Packed, where oneDNN has no products of the dtype, is the
    same as stored."""
    if form == "int8":
        return Int8(weight, bias)
    if form == "packed" and _can_pack(weight.dtype):
        return Packed(torch.ops.mkldnn._reorder_linear_weight(weight), bias)
    return Stored(weight.t(), bias)


def check_form(form: Form) -> None:
    """ConfigError if this machine's torch can't hold weights like that."""
    if form == "int8" and not torch._C._has_mkldnn:
        raise ConfigError(
            "node.cpu_weights is int8, but this torch is built without oneDNN: use stored"
        )


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@dataclass(frozen=True, slots=True)
class Stored:
    weight: Tensor
    """[in, out], a view."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(self.bias, x, self.weight)


@dataclass(frozen=True, slots=True)
class Packed:
    weight: Tensor
    """In oneDNN's own order."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return made


class Int8:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, self._scales = _rounded(weight)
        self._scales = self._scales[:, 0]
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._weight: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rounded, scales = _rounded(x)
        made: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, 0, self._weight, self._scales, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        made.mul_(scales)
        if self._bias is not None:
            made.add_(self._bias)
        return made.to(x.dtype)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row to [-127, 127], and its scale, [rows, 1] float32."""
    x = x.float()
    scales = x.abs().amax(1, keepdim=True).clamp_(min=1e-30).div_(127)
    return (x / scales).round_().to(torch.int8), scales
