"""One sweep for the rows of many paths, against one run for each path.

Nodes that hold parts of a model while it moves do this (services/node/engine/base.py).
"""

import time
from collections.abc import Sequence

import torch

from benchmarks.engine.ours import Ours
from services.node.engine.base import Draw, Row, StagePart
from shared.messages.serving import Sampling

PATHS, ROWS = 4, 6
PROMPT = 128
STEPS = 4
"""Decode steps that are timed at a time."""
LIMIT = PROMPT + 2 * STEPS


class Ranges:
    def __init__(self, ours: Ours) -> None:
        """PATHS paths, whose stages here begin at different blocks and end with the head."""
        self._engine, self._model = ours.engine, ours.model
        self._blocks = ours.manifest.n_blocks
        self._width = int(ours.manifest.config["hidden_size"])
        self._starts = [self._blocks * path // (PATHS + 1) for path in range(PATHS)]
        self._positions: dict[str, int] = {}

    def step_s(self) -> tuple[float, float]:
        """Mean seconds of a decode step of all paths: (in one sweep, in one sweep for each
        path)."""
        paths = range(PATHS)
        for path in paths:
            self._sweep([path], PROMPT)
        together = self._timed([paths])
        apart = self._timed([[path] for path in paths])
        self._engine.free(tuple(self._positions))
        self._positions.clear()
        return together, apart

    def _timed(self, sweeps: Sequence[Sequence[int]]) -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            for paths in sweeps:
                self._sweep(paths, 1)
        return (time.perf_counter() - began) / STEPS

    def _sweep(self, paths: Sequence[int], count: int) -> None:
        sweep = self._engine.begin(self._model)
        left = {sweep.join(self._part(path, count)) for path in paths}
        while left:
            left -= sweep.advance().keys()

    def _part(self, path: int, count: int) -> StagePart:
        start = self._starts[path]
        rows = tuple(self._row(f"{path}-{number}", start, count) for number in range(ROWS))
        hidden = torch.randn(ROWS * count, self._width) if start else None
        return StagePart(start, self._blocks, rows, hidden)

    def _row(self, key: str, start: int, count: int) -> Row:
        position = self._positions.get(key, 0)
        self._positions[key] = position + count
        tokens = () if start else (7,) * count
        return Row(key, position, count, LIMIT, tokens, Draw(0, Sampling()))
