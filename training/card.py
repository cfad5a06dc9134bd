"""The model's card."""

from collections.abc import Mapping
from dataclasses import dataclass

from training.network import Shape
from training.texts import HELD_OUT, Source
from training.train import LENGTH

LN_2 = 0.6931471805599453


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    shape: Shape
    characters: Mapping[Source, int]
    tokens: int
    held_out: int
    characters_a_token: float
    seen: int
    """Tokens that it was trained with, counted as often as they came."""
    cpu_s: float
    loss: float
    """Nats of a held-out token; `trigram`: the baseline's."""
    trigram: float


def text(facts: Facts) -> str:
    sources = "\n".join(
        f"| {source.what} | {source.package or 'this repository'} | {source.licence} | "
        f"{count / 1e6:.2f} |"
        for source, count in facts.characters.items()
    )
    shape = facts.shape
    return f"""---
license: apache-2.0
language: en
---
# The demo's model

A very small Llama that writes English: {shape.layers} layers, hidden size {shape.hidden}, a
vocabulary of {shape.vocab_size}, {parameters(shape) / 1e6:.1f} million parameters in bfloat16.
`lambdascale demo` and `lambdascale up` serve it, so that a first answer is language. It knows what
dictionaries sound like, and how Jane Austen wrote; it knows next to no facts, and what it says
is often nonsense. Ask it what a word means.

## Texts

They are carried by packages of Debian 12, and are in the public domain or as free.
`training/texts.py` reads them, and leaves out what is rude.

| text | package | licence | million characters |
|---|---|---|---|
{sources}

One document of {HELD_OUT} is held out ({facts.held_out:,} tokens); {facts.tokens / 1e6:.2f} million
tokens are trained with. WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved;
its licence is in the file WORDNET beside this one.

## Training

{facts.seen / 1e6:.1f} million tokens, in {facts.cpu_s / 60:.0f} minutes of one core of an AMD EPYC
(Zen 4): sequences of {LENGTH} tokens, Muon for the matrices and Adam for the rest.

| | nats a token | bits a character |
|---|---|---|
| this model, on what was held out | {facts.loss:.3f} | {bits(facts, facts.loss):.3f} |
| a trigram model of the same tokens | {facts.trigram:.3f} | {bits(facts, facts.trigram):.3f} |

To train it again: `nice -n 19 .venv/bin/python -m training --out DIR`. The same steps give the same
weights only on the same processor.
"""


def parameters(shape: Shape) -> int:
    kv = shape.kv_heads * shape.head_dim
    attention = 2 * shape.hidden * (shape.hidden + kv)
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * layer + shape.vocab_size * shape.hidden + shape.hidden


def bits(facts: Facts, loss: float) -> float:
    return loss / LN_2 / facts.characters_a_token
