"""A checksum that a device computes of its own bytes."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.node.memory.checksum import _MIX, CHECKSUM_BYTES, CHUNK, checksum

WORDS = st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=9)


def summed(words: list[int]) -> bytes:
    return checksum(torch.frombuffer(bytearray(raw(words)), dtype=torch.uint8))


def raw(words: list[int]) -> bytes:
    return b"".join(word.to_bytes(8, "little") for word in words)


@given(WORDS)
def test_it_is_two_sums_of_mixed_words(words: list[int]) -> None:
    mixed = words
    for factor, shift in _MIX:
        mixed = [word * factor % (1 << 64) for word in mixed]
        mixed = [word ^ word >> shift for word in mixed]
    plain = sum(mixed)
    placed = sum(word * (2 * place + 1) for place, word in enumerate(mixed))
    assert summed(words) == raw([plain % (1 << 64), placed % (1 << 64)])
    assert len(summed(words)) == CHECKSUM_BYTES


@given(WORDS, st.data())
def test_a_bit_that_differs_is_seen(words: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words) - 1))
    other = [*words]
    other[place] ^= 1 << data.draw(st.integers(0, 63))
    assert summed(other) != summed(words)


@pytest.mark.parametrize("words", [(1, 2), (0, 1 << 63), (5, 5 + (1 << 63)), (1, 7, 1 << 62)])
def test_words_that_change_places_are_seen(words: tuple[int, ...]) -> None:
    assert summed([words[-1], *words[1:-1], words[0]]) != summed([*words])


def test_signs_that_are_all_wrong_are_seen() -> None:
    """The highest bit of some words next to each other, which is the sign of a number."""
    numbers = random.Random(2)
    for _ in range(500):
        words = [numbers.getrandbits(64) for _ in range(4)]
        assert summed([word ^ 1 << 63 for word in words]) != summed(words)


def test_large_content_is_summed_in_chunks() -> None:
    content = torch.zeros(CHUNK * 8 + 64, dtype=torch.uint8)
    seen = {checksum(content)}
    for place in (0, CHUNK * 8 - 8, CHUNK * 8, CHUNK * 8 + 56):
        content[place] = 1
        seen.add(checksum(content))
        content[place] = 0
    assert len(seen) == 5


def test_a_part_of_a_memory_has_the_checksum_of_its_bytes() -> None:
    memory = torch.frombuffer(bytearray(random.Random(1).randbytes(4096)), dtype=torch.uint8)
    assert checksum(memory[1024:2048]) == checksum(memory[1024:2048].clone())
