"""The demo's model in float32, for nodes of any processor."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.local.demo_model import save_weights, write_json
from services.local.talking import CHECKPOINT, LICENCE
from services.node.checkpoints.config import EMBEDDING, HEAD

AS_THEY_ARE = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("README.md", LICENCE),
)


def make_wide(path: Path) -> None:
    """Writes the checkpoint into the directory `path`, in float32, with a head of its own.

    It computes the same function. In float32 its tokens do not depend on how a processor
    multiplies, and its files are as large as its blocks.
    """
    path.mkdir(parents=True)
    for name in AS_THEY_ARE:
        shutil.copyfile(CHECKPOINT / name, path / name)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    write_json(path / "config.json", config | {"dtype": "float32", "tie_word_embeddings": False})
    narrow = load_file(CHECKPOINT / "model.safetensors")
    weights = {name: tensor.to(torch.float32) for name, tensor in narrow.items()}
    save_weights(path, 1, weights | {HEAD: weights[EMBEDDING].clone()})
