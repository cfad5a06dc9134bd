"""Numbers on the command line: types for argparse, whose errors name the text and what was
expected."""

import argparse
import math


def count(text: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


def whole(text: str) -> int:
    return count(text, least=0)


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a number")
    return value


def amount(text: str) -> float:
    """A number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def amounts(text: str) -> tuple[float, ...]:
    return tuple(amount(part) for part in text.split(","))


def amount_or_zero(text: str) -> float:
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value
