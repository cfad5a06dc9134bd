"""The baseline: a trigram model over the same tokens, smoothed as Witten and Bell did (1991)."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Trigrams:
    """P(c | a b) = (n(abc) + d(ab) P(c | b)) / (n(ab) + d(ab)), where d(ab) is how many different
    tokens came behind a b; P(c | b) is made in the same way of P(c), and that of even chances."""

    def __init__(self, tokens: Ids, vocab_size: int) -> None:
        self._size = vocab_size
        self._tables = [_counted(self._keys(tokens, order)) for order in (1, 2, 3)]
        self._followers = [_counted(table[0] // vocab_size) for table in self._tables]
        self._seen = [_counted(self._keys(tokens[:-1], order)) for order in (1, 2)]
        self._total = len(tokens)

    def loss(self, tokens: Ids) -> float:
        """Mean nats for each token from the third on."""
        chances = np.full(len(tokens) - 2, 1 / self._size)
        for order in (1, 2, 3):
            keys = self._keys(tokens, order)[3 - order :]
            found = _look_up(self._tables[order - 1], keys)
            before = keys // self._size
            kinds = _look_up(self._followers[order - 1], before)
            seen = _look_up(self._seen[order - 2], before) if order > 1 else self._total
            weight = np.maximum(seen + kinds, 1)
            chances = np.where(seen + kinds > 0, (found + kinds * chances) / weight, chances)
        return float(-np.log(chances).mean())

    def _keys(self, tokens: Ids, order: int) -> Ids:
        """A number for each run of `order` tokens."""
        keys = np.zeros(len(tokens) - order + 1, dtype=np.int64)
        for offset in range(order):
            keys = keys * self._size + tokens[offset : len(tokens) - order + 1 + offset]
        return keys


def _counted(keys: Ids) -> tuple[Ids, Ids]:
    found, counts = np.unique(keys, return_counts=True)
    return found, counts.astype(np.int64)


def _look_up(table: tuple[Ids, Ids], keys: Ids) -> Ids:
    known, counts = table
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, counts[places], 0)
