"""Packs columns into unit capacities: the linear programme behind `paths`.

maximise sum_p value_p x_p, where sum_p load_p(n) x_p <= capacity(n) for every node n, x >= 0.

Columns come one at a time (column generation), so this is the revised simplex method on rows of
Python floats. A pivot costs nodes^2, and the solution is feasible after each pivot, so that the
caller may stop at any time. A solution uses at most as many columns as there are nodes.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

Column = TypeVar("Column")

_SPREAD = 1e-4
"""Capacities are lowered by up to this share, each by a different amount, so that no two rows tie:
ties make the simplex method stall."""
_GOLDEN = 0.6180339887498949
_ZERO = 1e-9


class Packing(Generic[Column]):
    """A feasible solution, and the price of each node's capacity in it."""

    def __init__(self, capacities: Sequence[float]) -> None:
        size = len(capacities)
        self.prices = [0.0] * size
        self.work = 0
        """How many numbers were changed so far: a measure of time that is the same on every
        machine."""
        self._inverse = [[float(i == j) for j in range(size)] for i in range(size)]
        self._amounts = [
            capacity * (1 - _SPREAD * (i * _GOLDEN % 1)) for i, capacity in enumerate(capacities)
        ]
        self._basis: list[Column | None] = [None] * size

    def gain(self, loads: Mapping[int, float], value: float) -> float:
        """What a unit of the column adds to the objective. The column improves the solution if this
        is > 0."""
        return value - sum(self.prices[node] * load for node, load in loads.items())

    def enter(self, column: Column, loads: Mapping[int, float], value: float) -> None:
        """Uses as much of an improving column as fits, in place of columns that are worth less.

        Where the price of a node's capacity would be negative, the capacity is left unused instead.
        """
        self._pivot(column, loads, value)
        for _ in self.prices:
            least = min(self.prices)
            if least >= -_ZERO:
                break
            self._pivot(None, {self.prices.index(least): 1.0}, 0.0)

    def _pivot(self, column: Column | None, loads: Mapping[int, float], value: float) -> None:
        gain = self.gain(loads, value)
        direction = [sum(row[node] * load for node, load in loads.items()) for row in self._inverse]
        row = self._leaving(direction)
        amount = self._amounts[row] / direction[row]
        pivot = [entry / direction[row] for entry in self._inverse[row]]
        for i, factor in enumerate(direction):
            if i != row and abs(factor) > _ZERO:
                self.work += len(pivot)
                self._amounts[i] -= factor * amount
                self._inverse[i] = [
                    entry - factor * scaled
                    for entry, scaled in zip(self._inverse[i], pivot, strict=True)
                ]
        self._inverse[row] = pivot
        self._amounts[row] = amount
        self._basis[row] = column
        self.prices = [p + gain * scaled for p, scaled in zip(self.prices, pivot, strict=True)]

    def _leaving(self, direction: Sequence[float]) -> int:
        """The row that fills up first. Among equals, the one with the largest pivot."""
        rows = [i for i, entry in enumerate(direction) if entry > _ZERO]
        least = min(self._amounts[i] / direction[i] for i in rows)
        tied = [i for i in rows if self._amounts[i] / direction[i] <= least + _ZERO]
        return max(tied, key=lambda i: direction[i])

    def solution(self) -> list[tuple[Column, float]]:
        """The columns in use, and how much of each is used."""
        return [
            (column, amount)
            for column, amount in zip(self._basis, self._amounts, strict=True)
            if column is not None and amount > _ZERO
        ]
