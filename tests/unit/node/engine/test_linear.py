"""Products with weights in every form: right, and the same for a row whatever the batch."""

import pytest
import torch

from services.node.engine.attention import ROWS
from services.node.engine.linear import Form, Linear, Packed, Stored, check_form, linear
from shared.errors import ConfigError

SHAPES = [(768, 2304), (2048, 768), (64, 96), (100, 36), (8, 12)]
"""[in, out]."""
FORMS: list[Form] = ["stored", "packed", "int8"]


def made(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Linear, torch.Tensor]:
    """(with a bias, the weight [out, in])."""
    torch.manual_seed(1)
    weight = (torch.randn(shape[::-1]) * 0.05).to(dtype)
    return linear(weight, torch.randn(shape[1]).to(dtype), form), weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_right(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
    product, weight = made(form, shape, dtype)
    x = torch.randn(12, shape[0]).to(dtype)
    torch.manual_seed(1)
    torch.randn(shape[::-1])
    expected = x.double() @ weight.double().t() + torch.randn(shape[1]).to(dtype)
    got = product(x)
    assert got.dtype == dtype
    error = (got.double() - expected).norm() / expected.norm()
    assert error < (0.02 if form == "int8" else 0.005 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_batch(
    form: Form, shape: tuple[int, int], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product, _ = made(form, shape, torch.float32)
        x = torch.randn(640, shape[0])
        expected = product(x)
        for rows in [*range(ROWS, 70, ROWS), 96, 128, 256, 400, 516]:
            at = (7 * rows) % (640 - rows)
            assert torch.equal(product(x[at : at + rows].contiguous()), expected[at : at + rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_has_them_in_bf16_too(shape: tuple[int, int]) -> None:
    product, _ = made("int8", shape, torch.bfloat16)
    x = torch.randn(256, shape[0]).bfloat16()
    expected = product(x)
    for rows in (ROWS, 32, 36, 64, 128):
        assert torch.equal(product(x[:rows]), expected[:rows])


def test_a_row_of_zeros_is_no_trouble_for_int8() -> None:
    product, _ = made("int8", (64, 96), torch.float32)
    x = torch.zeros(ROWS, 64)
    assert torch.isfinite(product(x)).all()


def test_what_cannot_be_packed_is_used_as_it_is() -> None:
    weight = torch.randn(8, 16)
    assert isinstance(linear(weight, None, "packed"), Packed)
    assert isinstance(linear(weight.half(), None, "packed"), Stored)


def test_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(linear(torch.randn(8, 16).to(dtype), None, "packed"), Stored)
    check_form("packed")
    with pytest.raises(ConfigError, match=r"node\.cpu_weights is int8"):
        check_form("int8")
