"""What queueing theory says of instances that serve one request after the other, in the order in
which they came, with exponential work of mean 1 on each of n equal instances at a load below 1."""

from collections.abc import Callable
from itertools import pairwise
from math import exp, inf, log

QUANTILE = 0.99
_NEVER = 1e-15


def erlang_c(n: int, load: float) -> float:
    """The probability that a request waits in M/M/n."""
    offered, blocked = n * load, 1.0
    for servers in range(1, n + 1):  # Erlang B, by recursion
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def one_queue_wait(n: int, load: float, quantile: float = QUANTILE) -> float:
    """The quantile of the wait in M/M/n: one queue for all, which no choice can beat."""
    waits = erlang_c(n, load)
    return max(0.0, log(waits / (1 - quantile)) / (n * (1 - load)))


def random_wait(load: float, quantile: float = QUANTILE) -> float:
    """Of instances that are drawn at random: each is an M/M/1."""
    return one_queue_wait(1, load, quantile)


def shares(load: float) -> list[float]:
    """The share of instances with at least 0, 1, 2, ... requests, for two choices among infinitely
    many (Mitzenmacher: the power of two choices, theorem 1): load^(2^i - 1)."""
    found = [1.0]
    while found[-1] > _NEVER:
        found.append(load ** (2 ** len(found) - 1))
    return found


def two_choices_wait(load: float, quantile: float = QUANTILE) -> float:
    """A request joins an instance with at least i requests if both choices have as many, and then
    waits for i exponential times."""
    joins = [share**2 for share in shares(load)] + [0.0]
    exactly = [a - b for a, b in pairwise(joins)]

    def waits_longer(seconds: float) -> float:
        return sum(p * _erlang_tail(i, seconds) for i, p in enumerate(exactly) if i)

    return _where(waits_longer, 1 - quantile)


def two_choices_longest(n: int, load: float) -> int:
    """The longest queue among n instances that is to be expected at a moment: the last length which
    at least one of them has, about log log n / log 2 more than at n = 2."""
    return max(i for i, share in enumerate(shares(load)) if n * share >= 1)


def _erlang_tail(stages: int, seconds: float) -> float:
    term = total = exp(-seconds)
    for stage in range(1, stages):
        term *= seconds / stage
        total += term
    return total


def _where(falling: Callable[[float], float], value: float) -> float:
    """Where a falling function is `value`."""
    low, high = 0.0, 1.0
    while falling(high) > value and high < inf:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return high
