"""Where packed weights lie."""

import mmap

import pytest
import torch

from services.node.engine.huge_pages import HUGE, LEAST, HugePages
from services.node.engine.linear import linear


def test_matrices_of_a_block_lie_side_by_side_from_a_huge_page_on() -> None:
    pages = HugePages(LEAST)
    first = pages.take(512, 1024, torch.float32)
    second = pages.take(33, 5, torch.bfloat16)
    third = pages.take(32, 32, torch.int8)
    assert first.shape == (512, 1024)
    assert first.data_ptr() % HUGE == 0
    assert second.shape == (33, 5)
    assert second.dtype == torch.bfloat16
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert third.data_ptr() % 64 == 0
    for number, tensor in enumerate((first, second, third)):
        tensor.fill_(number)
    assert [float(tensor.float().mean()) for tensor in (first, second, third)] == [0, 1, 2]


def test_small_blocks_and_what_exceeds_a_block_lie_in_torch_memory() -> None:
    assert HugePages(LEAST - 1).take(32, 32, torch.float32).data_ptr() % HUGE
    pages = HugePages(LEAST)
    outputs = 2 * LEAST // 4 // 1024
    assert pages.take(outputs, 1024, torch.float32).fill_(1).sum() == outputs * 1024
    assert pages.take(32, 32, torch.float32).data_ptr() % HUGE == 0


def test_without_huge_pages_torch_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert HugePages(LEAST).take(32, 32, torch.float32).data_ptr() % HUGE


def test_a_tensor_keeps_its_memory_and_products_are_the_same() -> None:
    weight = torch.randn(96, 64)
    pages = HugePages(LEAST)
    product = linear(weight, None, "packed", pages)
    del pages
    x = torch.randn(5, 64)
    assert torch.equal(product(x), linear(weight, None, "packed")(x))
