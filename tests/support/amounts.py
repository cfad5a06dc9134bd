"""How much the tests try.

`./lambdascale test` takes minutes: tests that could go on for ever, over seeds, examples and
combinations, try enough of them to find most faults. `./lambdascale test --thorough` tries all that
they name, and takes a few times as long: before a release, or after a change of what many parts
stand on. `./lambdascale test --fast` has fewer examples.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

from services.cli import self_test

FAST, THOROUGH = (
    os.environ.get(self_test.AMOUNT) == each for each in (self_test.FEW, self_test.MUCH)
)
MORE_EXAMPLES = 8
FEWER_EXAMPLES = 3

Case = TypeVar("Case")


def amount(usual: int, *, thorough: int) -> int:
    return thorough if THOROUGH else usual


def examples(usual: int) -> int:
    """How many examples Hypothesis tries, or how many sequences of steps."""
    return -(-usual // FEWER_EXAMPLES) if FAST else amount(usual, thorough=MORE_EXAMPLES * usual)


def cases(usual: Iterable[Case], *, thorough: Iterable[Case]) -> list[Case]:
    """The cases of a parametrized test: `usual`, and in a thorough run those of `thorough` as well
    (which may repeat the usual ones)."""
    found = list(usual)
    return found + [case for case in thorough if THOROUGH and case not in found]
