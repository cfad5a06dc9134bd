"""How much the tests try.

`./lambdascale test` takes minutes: tests that could go on for ever, over seeds, examples and
combinations, try enough of them to find most faults. `./lambdascale test --thorough` tries all that
they name, and takes a few times as long: before a release, or after a change of what many parts
stand on.
"""

import os
from collections.abc import Iterable
from typing import TypeVar

from services.cli import self_test

THOROUGH = os.environ.get(self_test.THOROUGH, "") != ""
MORE_EXAMPLES = 8

Case = TypeVar("Case")


def amount(usual: int, *, thorough: int) -> int:
    return thorough if THOROUGH else usual


def examples(usual: int) -> int:
    """How many examples Hypothesis tries, or how many sequences of steps."""
    return amount(usual, thorough=MORE_EXAMPLES * usual)


def cases(usual: Iterable[Case], *, thorough: Iterable[Case]) -> list[Case]:
    """The cases of a parametrized test: `usual`, and in a thorough run those of `thorough` as well
    (which may repeat the usual ones)."""
    found = list(usual)
    return found + [case for case in thorough if THOROUGH and case not in found]
