"""Tokens for which every replica of a model has the same log probabilities, but for rounding.

Gateways ask replicas for them now and then, and compare their answers. A node compares its answers
with its own earlier ones.
"""

from statistics import fmean

TOKENS = tuple(range(1, 25))
"""Every vocabulary has these ids, and every context room for so many."""
Answer = tuple[float, ...]
"""Log probabilities of the tokens after the first."""
TOLERANCE = 0.5
"""The most that two answers may differ, in the mean. Other processors, and weights of 8 bits, round
otherwise. That changes a log probability by some hundredths; wrong weights or a broken unit change
it by several units."""
LEAST = -50.0
"""What is less probable counts as this. Infinities cannot be compared."""


def alike(one: Answer, other: Answer) -> bool:
    """False also if one of them has what is not a number."""
    if len(one) != len(other):
        return False
    pairs = zip(one, other, strict=True)
    return fmean(abs(max(a, LEAST) - max(b, LEAST)) for a, b in pairs) <= TOLERANCE
