"""Trains for a given time of the processor, whatever share of it there is."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.network import Network, Shape
from training.optimizer import Muon

BATCH, LENGTH = 16, 128
SHIFT = 97
"""By how many tokens a pass over the texts is shifted against the one before."""
MATRIX_RATE, OTHER_RATE = 0.02, 0.004
WARM_UP_STEPS = 20
DECAY = 0.4
"""The last part of the time, over which rates fall to zero."""
SAY_EVERY = 20
SAVE_EVERY_S = 120.0


Ids = NDArray[np.integer[Any]]


@dataclass(slots=True)
class Progress:
    steps: int = 0
    spent_s: float = 0.0
    cpu_s: float = 0.0
    loss: float = 0.0
    """Nats a token, smoothed over the last steps."""

    @property
    def tokens(self) -> int:
        return self.steps * BATCH * LENGTH

    def __str__(self) -> str:
        return (
            f"{self.spent_s:6.0f} s, {self.cpu_s:6.0f} s of the processor, step {self.steps:5}, "
            f"{self.tokens / 1e6:6.2f} million tokens, loss {self.loss:.3f}"
        )


class Batches:
    """Sequences of the tokens in random order; each pass over them begins at other places."""

    def __init__(self, tokens: Ids) -> None:
        self._tokens = tokens
        self._places = (len(tokens) - 1) // LENGTH - 1
        self._turn = -1
        self._order = np.zeros(0, dtype=np.int64)

    def take(self, step: int) -> Tensor:
        """[BATCH, LENGTH + 1] of a step."""
        rows = [self._row(number) for number in range(step * BATCH, (step + 1) * BATCH)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _row(self, number: int) -> Ids:
        turn, place = divmod(number, self._places)
        if turn != self._turn:
            self._turn = turn
            self._order = np.random.default_rng(turn).permutation(self._places)
        start = self._order[place] * LENGTH + turn * SHIFT % LENGTH
        return self._tokens[start : start + LENGTH + 1]


class Trainer:
    """The network in full precision, its copy in bfloat16 that computes, and the optimizers."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.network = Network(shape)
        self._half = Network(shape).bfloat16()
        self._half.cos, self._half.sin = self.network.cos, self.network.sin
        self._pairs = list(zip(self.network.parameters(), self._half.parameters(), strict=True))
        self._matrices = [w for w in self.network.layers.parameters() if w.dim() == 2]
        self._muon = Muon(self._matrices)
        known = set(self._matrices)
        others = [w for w in self.network.parameters() if w not in known]
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.97), weight_decay=0.0)

    def step(self, batch: Tensor, pace: float) -> float:
        """Its loss. `pace`: the part of the full rates."""
        with torch.no_grad():
            for full, rounded in self._pairs:
                rounded.copy_(full)
                rounded.grad = None
        loss = self._half.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for full, rounded in self._pairs:
            assert rounded.grad is not None
            full.grad = rounded.grad.float()
        self._muon.step(MATRIX_RATE * pace)
        for group in self._adam.param_groups:
            group["lr"] = OTHER_RATE * pace
        self._adam.step()
        return loss.item()

    def save(self, path: Path, progress: Progress) -> None:
        state = {
            "network": self.network.state_dict(),
            "muon": [self._muon.momenta[weight] for weight in self._matrices],
            "adam": self._adam.state_dict(),
            "progress": asdict(progress),
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.rename(path)

    def load(self, path: Path) -> Progress:
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self._muon.momenta = dict(zip(self._matrices, state["muon"], strict=True))
        self._adam.load_state_dict(state["adam"])
        return Progress(**state["progress"])


def train(tokens: Ids, shape: Shape, cpu_s: float, checkpoint: Path) -> tuple[Network, Progress]:
    """`tokens`: all documents one after the other. `cpu_s`: with that of former calls, from whose
    `checkpoint` it goes on if that is there. It leaves one every SAVE_EVERY_S seconds."""
    trainer, batches = Trainer(shape), Batches(tokens)
    progress = trainer.load(checkpoint) if checkpoint.exists() else Progress()
    began, cpu_began = time.monotonic() - progress.spent_s, time.process_time() - progress.cpu_s
    saved_at = time.monotonic()
    while progress.cpu_s < cpu_s:
        left = 1 - progress.cpu_s / cpu_s
        pace = min(1.0, left / DECAY, (progress.steps + 1) / WARM_UP_STEPS)
        loss = trainer.step(batches.take(progress.steps), pace)
        progress.steps += 1
        smooth = max(0.05, 1 / progress.steps)
        progress.loss += smooth * (loss - progress.loss)
        progress.spent_s = time.monotonic() - began
        progress.cpu_s = time.process_time() - cpu_began
        if progress.steps % SAY_EVERY == 0:
            print(progress, flush=True)
        if time.monotonic() - saved_at > SAVE_EVERY_S:
            saved_at = time.monotonic()
            trainer.save(checkpoint, progress)
    trainer.save(checkpoint, progress)
    return trainer.network, progress
