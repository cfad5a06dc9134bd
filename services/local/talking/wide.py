"""The demo's model in float32 and with wider layers, in the proportions of larger models."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from services.local.demo_model import save_weights, write_json
from services.local.talking import CHECKPOINT, LICENCE
from services.node.checkpoints.config import EMBEDDING, HEAD

COPIES = 8
"""How often each neuron of an MLP stands in the wide model. What a token sends from stage to stage
grows with the hidden size, not with the layers. Of a model of 2.7 million parameters this is much:
on a link that copies the weights in 5 s it took a quarter of the bytes, where it takes a thousandth
for a model of 13 billion."""
AS_THEY_ARE = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("README.md", LICENCE),
)


def make_wide(path: Path) -> None:
    """Writes the checkpoint into the directory `path`, in float32, with a head of its own, and with
    every neuron of the MLPs COPIES times, each at that fraction of its weight.

    It computes the same function, up to rounding. In float32 its tokens do not depend on how a
    processor multiplies, and its files are as large as its blocks.
    """
    path.mkdir(parents=True)
    for name in AS_THEY_ARE:
        shutil.copyfile(CHECKPOINT / name, path / name)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    wide = {
        "dtype": "float32",
        "tie_word_embeddings": False,
        "intermediate_size": config["intermediate_size"] * COPIES,
    }
    write_json(path / "config.json", config | wide)
    narrow = load_file(CHECKPOINT / "model.safetensors")
    weights = {name: _widen(name, tensor.to(torch.float32)) for name, tensor in narrow.items()}
    save_weights(path, 1, weights | {HEAD: weights[EMBEDDING].clone()})


def _widen(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith(("gate_proj.weight", "up_proj.weight")):
        return tensor.repeat(COPIES, 1)
    if name.endswith("down_proj.weight"):
        return tensor.repeat(1, COPIES) / COPIES
    return tensor
