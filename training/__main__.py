"""Trains the demo's model anew, and writes it and its card to a directory.

    python -m training --out DIR [--cpu-minutes 20] [--work DIR]

It uses one thread, so that it can run beside other work (`nice -n 19`), and leaves a checkpoint
every two minutes, from which the next call goes on. It needs Debian's apt-get, for the texts.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from services.local.demo_tokenizer import BOS, EOS, train_tokenizer
from services.local.talking import CHECKPOINT, LICENCE
from training import card
from training.export import export
from training.network import Network, Shape
from training.texts import SOURCES, Document, read, split
from training.train import LENGTH, train
from training.trigram import Trigrams

EVALUATED = 16
"""Sequences at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu-minutes", type=float, default=20.0)
    parser.add_argument("--work", type=Path, default=Path("training-work"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape()
    found = {source: read(source, args.work) for source in SOURCES}
    kept, held = split([document for documents in found.values() for document in documents])
    tokenizer = _tokenizer(args.work / "tokenizer.json", shape, kept)
    tokens, tests = encoded(tokenizer, kept), encoded(tokenizer, held)
    network, progress = train(tokens, shape, 60 * args.cpu_minutes, args.work / "checkpoint.pt")
    export(network, tokenizer, args.out)
    facts = card.Facts(
        shape=shape,
        characters={
            source: sum(len(turn) for each in texts for turn in each)
            for source, texts in found.items()
        },
        tokens=len(tokens),
        held_out=len(tests),
        characters_a_token=sum(len(turn) for each in held for turn in each) / len(tests),
        seen=progress.tokens,
        cpu_s=progress.cpu_s,
        loss=measured(network, tests),
        trigram=Trigrams(tokens.astype(np.int64), shape.vocab_size).loss(tests.astype(np.int64)),
    )
    (args.out / "README.md").write_text(card.text(facts))
    if args.out.resolve() != CHECKPOINT:
        shutil.copyfile(CHECKPOINT / LICENCE, args.out / LICENCE)
    print(card.text(facts))


def _tokenizer(path: Path, shape: Shape, documents: list[Document]) -> Tokenizer:
    """That of the former call, or a new one."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(shape.vocab_size, (turn for each in documents for turn in each))
    tokenizer.save(str(path))
    return tokenizer


def encoded(tokenizer: Tokenizer, documents: list[Document]) -> NDArray[np.uint16]:
    """All documents one after the other, as the chat template writes them."""
    special = tokenizer.get_vocab()
    begin, end, user, assistant = (
        special[token] for token in (BOS, EOS, "<|user|>", "<|assistant|>")
    )
    turns = [turn for document in documents for turn in document]
    each = iter(tokenizer.encode_batch(turns, add_special_tokens=False))
    ids: list[int] = []
    for document in documents:
        ids.append(begin)
        if len(document) == 1:
            ids += next(each).ids
        else:
            ids += [user, *next(each).ids, end, assistant, *next(each).ids]
        ids.append(end)
    return np.array(ids, dtype=np.uint16)


@torch.no_grad()
def measured(network: Network, tokens: NDArray[np.uint16]) -> float:
    """Mean nats of a held-out token, in sequences as long as those of the training."""
    rows = (len(tokens) - 1) // LENGTH
    wide = torch.from_numpy(tokens[: rows * LENGTH + 1].astype(np.int64))
    batches = [
        torch.stack([wide[row * LENGTH : (row + 1) * LENGTH + 1] for row in rows_of])
        for rows_of in np.array_split(np.arange(rows), -(-rows // EVALUATED))
    ]
    return sum(float(network.loss(batch)) * len(batch) for batch in batches) / rows


if __name__ == "__main__":
    main()
