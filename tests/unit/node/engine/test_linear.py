"""Products with weights in every form: right, and the same for a row whatever the batch."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from services.node.engine import kernels
from services.node.engine.kernels import Kernels
from services.node.engine.linear import Form, Packed, Stored, check_form, gate, linear
from services.node.engine.ops import TorchOps
from shared.errors import ConfigError
from tests.support.amounts import cases

SHAPES = [(768, 2304), (2048, 768), (640, 70), (100, 36), (1037, 96), (8, 12)]
"""[in, out]."""
FORMS: list[Form] = ["stored", "packed", "int8"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
silu_times = TorchOps().silu_times
OTHERS = {
    "pairs": ("-mno-amx-tile", "-mno-amx-bf16"),
    "pairs without tables": ("-mno-amx-tile", "-mno-amx-bf16", "-mno-avx512vbmi"),
    "vectors": ("-mno-amx-tile", "-mno-amx-bf16", "-mno-avx512bf16"),
    "narrow vectors": ("-mno-amx-tile", "-mno-amx-bf16", "-mno-avx512f"),
    "the oldest": ("-march=x86-64",),
    "nothing inlined": ("-fno-inline",),
}
"""Compiler flags, for what other processors would run, and other compilers make of it."""

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


def made(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight [out, in], bias)."""
    torch.manual_seed(1)
    return (torch.randn(shape[::-1]) * 0.05).to(dtype), torch.randn(shape[1]).to(dtype)


def near(got: torch.Tensor, expected: torch.Tensor, form: Form) -> bool:
    """`expected`: float64."""
    most = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[got.dtype]
    error = (got.double() - expected).norm() / expected.norm()
    return bool(error < (0.02 if form == "int8" else most))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_right(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = made(shape, dtype)
    x, before = torch.randn(13, shape[0]).to(dtype), torch.randn(13, shape[1]).to(dtype)
    expected = x.double() @ weight.double().t()
    product = linear(weight, bias, form)
    got = product(x)
    assert got.dtype == dtype
    assert near(got, expected + bias.double(), form)
    assert near(linear(weight, None, form)(x), expected, form)
    after = before.clone()
    product.add(x, after)
    assert near(after, before.double() + expected + bias.double(), form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_gate_is_right(form: Form, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = made(shape, dtype)
    x = torch.randn(13, shape[0]).to(dtype)
    for own in (None, bias):
        both = functional.linear(x.double(), weight.double(), None if own is None else own.double())
        expected = functional.silu(both.chunk(2, 1)[0]) * both.chunk(2, 1)[1]
        assert near(gate(weight, own, form, silu_times)(x), expected, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_may_be_anything(form: Form) -> None:
    gates = torch.tensor([-torch.inf, -1e30, -88.0, -1.0, 0.0, 1.0, 88.0, 1e30, torch.nan])
    biases = torch.cat((gates, torch.ones(9)))
    got = gate(torch.zeros(18, 8), biases, form, silu_times)(torch.zeros(1, 8))[0]
    expected = torch.tensor([0, 0, 0, -0.26894143, 0, 0.7310586, 88, 1e30, torch.nan])
    assert torch.allclose(got[1:], expected[1:], atol=1e-6, equal_nan=True)


def bits_are_the_same(
    run: Callable[[torch.Tensor], torch.Tensor], inputs: int, x: torch.Tensor
) -> None:
    expected = run(x)
    for rows in [*range(1, 35), 47, 48, 64, 65, 128, 255, 256, 257, 288, 400, 516]:
        at = (7 * rows) % (len(x) - rows)
        assert torch.equal(run(x[at : at + rows].contiguous()), expected[at : at + rows]), rows


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_batch(
    form: Form, shape: tuple[int, int], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, bias = made(shape, torch.float32)
        bits_are_the_same(linear(weight, bias, form), shape[0], torch.randn(640, shape[0]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif("MKL_CBWR" in os.environ, reason="MKL's strict mode (Intel): the test above")
@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("shape", [(50, 20), (33, 40), (768, 8), (64, 68)], ids=str)
def test_nor_does_it_depend_on_addresses(shape: tuple[int, int], threads: int) -> None:
    """Few outputs a thread, and rows and weights that begin anywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, bias = made(shape, torch.float32)
        x = torch.randn(640, shape[0])
        expected = linear(weight, bias, "stored")(x)
        for shift in (1, 2, 4, 9):
            moved = torch.empty(weight.numel() + shift)[shift:].view(weight.shape).copy_(weight)
            assert torch.equal(linear(moved, bias, "stored")(x), expected)
        bits_are_the_same(linear(weight, bias, "stored"), shape[0], x)
    finally:
        torch.set_num_threads(before)


@needs_cc
@pytest.mark.parametrize("way", [kernels.VECTORS, kernels.PAIRS, kernels.TILES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["packed", "int8"])
def test_bf16_too_if_it_is_packed(
    form: Form, shape: tuple[int, int], way: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = kernels.load()
    assert compiled is not None
    if way > compiled.way:
        pytest.skip("this processor has no pairs (AVX-512 BF16) or no tiles (AMX)")
    monkeypatch.setattr(compiled, "way", way)
    weight, bias = made(shape, torch.bfloat16)
    x = torch.randn(640, shape[0]).bfloat16()
    bits_are_the_same(linear(weight, bias, form), shape[0], x)
    bits_are_the_same(gate(weight, bias, form, silu_times), shape[0], x)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once, for this processor: it takes the longest, and has no part in products."""
    compiled = tmp_path_factory.mktemp("kernels") / "attention.o"
    command = ["cc", *kernels.FLAGS, "-c", str(kernels.HERE / "attention.c"), "-o", str(compiled)]
    subprocess.run(command, check=True, capture_output=True)
    return compiled


@pytest.fixture(scope="module", params=cases(["pairs", "the oldest"], thorough=OTHERS))
def other(request: pytest.FixtureRequest, attention: Path) -> Kernels:
    library = attention.with_name(f"{request.param}.so")
    flags = [flag for flag in OTHERS[request.param] if _takes(flag)]
    parts = [attention if path.stem == "attention" else path for path in kernels.SOURCES]
    command = ["cc", *kernels.FLAGS, *flags, *map(str, parts), "-o", str(library), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return Kernels(ctypes.CDLL(str(library)))


@needs_cc
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("form", ["packed", "int8"])
def test_other_processors_and_compilers(form: Form, dtype: torch.dtype, other: Kernels) -> None:
    weight, bias = made((650, 70), dtype)
    x = torch.randn(300, 650).to(dtype)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    product = Packed(other, weight, bias, form)
    assert near(product(x), expected, form)
    bits_are_the_same(product, 650, torch.cat((x, x, x)))


def _takes(flag: str) -> bool:
    made = subprocess.run(["cc", "-Werror", flag, "-xc", "-fsyntax-only", "/dev/null"], check=False)
    return made.returncode == 0


@needs_cc
@pytest.mark.parametrize("form", ["packed", "int8"])
def test_activations_may_be_wider_than_weights(form: Form) -> None:
    weight, _ = made((640, 70), torch.bfloat16)
    x = torch.randn(5, 640)
    got = linear(weight, None, form)(x)
    assert got.dtype == torch.float32
    assert (got.double() - x.double() @ weight.double().t()).norm() < 0.02 * got.norm()


def test_zeros_are_no_trouble_for_int8() -> None:
    weight, _ = made((64, 96), torch.float32)
    weight[5] = 0
    got = linear(weight, None, "int8")(torch.randn(3, 64))
    assert torch.isfinite(got).all()
    assert not got[:, 5].any()


@needs_cc
@pytest.mark.parametrize("weird", [torch.inf, torch.nan])
def test_weights_that_are_not_finite_are_seen_in_8_bits_too(weird: float) -> None:
    weight, _ = made((64, 96), torch.float32)
    weight[5, 7] = weird
    got = linear(weight, None, "int8")(torch.randn(3, 64))
    assert got[:, 5].isnan().all()
    assert torch.isfinite(got[:, [i for i in range(96) if i != 5]]).all()


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight, _ = made((100, 36), torch.bfloat16)
    x = torch.randn(40, 100).bfloat16()
    x[3, 99], x[20, 0] = torch.nan, torch.inf
    finite = torch.isfinite(linear(weight, None, "packed")(x))
    assert not finite[[3, 20]].any()
    assert finite[[row for row in range(40) if row not in (3, 20)]].all()


@needs_cc
def test_what_cannot_be_packed_is_used_as_it_is() -> None:
    weight = torch.randn(8, 16)
    assert isinstance(linear(weight, None, "packed"), Packed)
    assert isinstance(linear(weight.half(), None, "packed"), Stored)


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", lambda: None)
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(linear(torch.randn(8, 16).to(dtype), None, "packed"), Stored)
    check_form("packed")
    with pytest.raises(ConfigError, match=r"node\.cpu_weights is int8"):
        check_form("int8")
