"""The network is transformers' Llama, its optimizers do what they say, and training goes on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.local.demo_tokenizer import train_tokenizer
from training.export import export
from training.network import Network, Shape
from training.optimizer import orthogonal
from training.train import BATCH, LENGTH, Batches, Trainer, train
from training.trigram import Trigrams

SMALL = Shape(layers=2, hidden=64, intermediate=96, heads=2, kv_heads=1, vocab_size=300)
TEXT = np.tile(np.arange(5, 105), 60)
"""Tokens that always follow each other in the same way."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_the_checkpoint_is_the_network_for_transformers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = Network(SMALL)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_((weight + torch.randn_like(weight) / 10).bfloat16())
    export(network, train_tokenizer(SMALL.vocab_size), tmp_path)
    oracle: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, SMALL.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(network(tokens), oracle(tokens).logits, rtol=1e-4, atol=1e-4)


def test_steps_learn() -> None:
    trainer, batches = Trainer(SMALL), Batches(TEXT)
    losses = [trainer.step(batches.take(step), 1.0) for step in range(12)]
    assert losses[-1] < 0.6 * losses[0]


def test_training_goes_on_where_it_was(tmp_path: Path) -> None:
    trainer, batches = Trainer(SMALL), Batches(TEXT)
    trainer.step(batches.take(0), 1.0)
    _, progress = train(TEXT, SMALL, 0.0, tmp_path / "checkpoint")
    trainer.save(tmp_path / "checkpoint", progress)
    other = Trainer(SMALL)
    assert other.load(tmp_path / "checkpoint") == progress
    assert other.step(batches.take(1), 1.0) == trainer.step(batches.take(1), 1.0)


def test_each_pass_takes_every_place_once() -> None:
    batches = Batches(np.arange(LENGTH * (BATCH + 2)))
    first = batches.take(0)
    assert first.shape == (BATCH, LENGTH + 1)
    assert sorted(first[:, 0].tolist()) == [LENGTH * place for place in range(BATCH)]
    assert (batches.take(1)[:, 0] % LENGTH != 0).all()


def test_directions_are_orthogonal() -> None:
    made = orthogonal(torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0)))
    values = torch.linalg.svdvals(made.float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_baselines_chances_sum_to_one() -> None:
    random = np.random.default_rng(0)
    model = Trigrams(random.integers(0, 12, 200) * random.integers(0, 2, 200), 12)
    for before in ([0, 0], [3, 5], [11, 11]):
        chances = [np.exp(-model.loss(np.array([*before, token]))) for token in range(12)]
        assert sum(chances) == pytest.approx(1)


def test_the_baseline_knows_what_it_has_seen() -> None:
    model = Trigrams(TEXT, 300)
    assert model.loss(TEXT) < 0.2
    assert model.loss(np.array([5, 6, 200])) > 4
