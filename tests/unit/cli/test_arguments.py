"""Numbers on the command line: what is taken, and what is refused in which words."""

import argparse
from collections.abc import Callable

import pytest

from services.cli.arguments import amount, amount_or_zero, amounts, count, counts, number, whole


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (count, "12", 12),
        (whole, "0", 0),
        (counts, "3,1,3", (3, 1, 3)),
        (number, "-2.5", -2.5),
        (amount, "1e3", 1000.0),
        (amounts, "1,2.5", (1.0, 2.5)),
        (amount_or_zero, "0", 0.0),
    ],
)
def test_numbers_are_read(read: Callable[[str], object], text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "complaint"),
    [
        (count, "0", "0 is not a whole number of at least 1"),
        (count, "1.5", "1.5 is not a whole number of at least 1"),
        (count, "²", "² is not a whole number of at least 1"),
        (whole, "-1", "-1 is not a whole number of at least 0"),
        (counts, "4,", " is not a whole number of at least 1"),
        (number, "nan", "nan is not a number"),
        (amount, "0", "0 is not more than 0"),
        (amounts, "1,inf", "inf is not a number"),
        (amount_or_zero, "-1", "-1 is less than 0"),
    ],
)
def test_other_texts_are_refused_by_name(
    read: Callable[[str], object], text: str, complaint: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read(text)
    assert str(refused.value) == complaint
