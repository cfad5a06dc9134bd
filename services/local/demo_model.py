"""Makes checkpoints of Llama with random weights: real files in every respect but their training.

They are for tests and benchmarks, which need models of all sizes. Such a model says nonsense, but
it is a hard case for a serving system: random attention is sharp, so that every token depends on
the whole context, and one wrong byte anywhere changes everything that follows.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from services.local.demo_tokenizer import (
    BOS,
    EOS,
    MIN_VOCAB,
    SPECIAL_TOKENS,
    tokenizer_config,
    train_tokenizer,
)
from services.node.checkpoints.config import EMBEDDING, HEAD, ModelConfig
from shared.errors import BadInput

ROPE_THETA = 10000.0

# Standard deviation of each kind of weight, times sqrt(fan-in). Chosen by measurement, so that
# greedy decoding neither hangs on rounding nor falls into loops: queries and keys give attention
# scores a deviation of about 2 (it looks at a few tokens, not at the mean of all); what the
# sublayers add up to is as large as the embedding; logits have a deviation of about 4.
GAINS = {"q_proj": 1.5, "k_proj": 1.5, "o_proj": 0.5, "down_proj": 0.5, "fc2": 0.5}
HEAD_GAIN = 4.0
# Log-deviation of the head's row lengths: it widens the gap between the best two tokens. More
# than this, and a few tokens win everywhere.
VOICE_SPREAD = 0.2
# Tokens that are no text by themselves (pieces of UTF-8, control tokens, the end) are hardly ever
# chosen.
QUIET = 0.05
_SPECIAL_IDS = {
    "bos_token_id": SPECIAL_TOKENS.index(BOS),
    "eos_token_id": SPECIAL_TOKENS.index(EOS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab_size: int
    context_length: int = 4096
    dtype: torch.dtype = torch.float32
    tied: bool = False
    shards: int = 1
    """The number of files of weights. If there are several, an index names what is in each."""
    old_config: bool = False
    """Writes config.json in the form from before transformers 5."""
    rope_scaling: dict[str, Any] | None = None
    """For example {"rope_type": "llama3", "factor": 8.0, ...}."""
    seed: int = 0


def make_random_model(path: Path, *, layers: int = 14, hidden: int = 256, seed: int = 0) -> None:
    """A model for benchmarks: 48 MB in fp32, `layers` + 2 units of nearly equal size.

    The vocabulary is chosen so that the embedding is as large as a layer. `hidden`: a multiple of
    128. It takes a few seconds and no network, and gives the same bytes for the same arguments.
    """
    if hidden < 128 or hidden % 128:
        raise BadInput(f"hidden size {hidden} is not a multiple of 128")
    heads = hidden // 32
    kv_heads, intermediate = heads // 4, 3 * hidden
    layer_rows = 2 * hidden + 2 * 32 * kv_heads + 3 * intermediate
    make_checkpoint(
        path,
        CheckpointSpec(
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            heads=heads,
            kv_heads=kv_heads,
            vocab_size=layer_rows // 64 * 64,
            seed=seed,
        ),
    )


def make_checkpoint(path: Path, spec: CheckpointSpec) -> None:
    """Writes config, weights, tokenizer and chat template into the directory `path`."""
    if spec.vocab_size < MIN_VOCAB:
        raise BadInput(f"vocabulary of {spec.vocab_size} tokens: at least {MIN_VOCAB} are needed")
    config = _config(spec)
    tokenizer = train_tokenizer(spec.vocab_size)
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", _SPECIAL_IDS)
    (path / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    (path / "tokenizer_config.json").write_text(tokenizer_config(spec.context_length))
    weights = _weights(spec, ModelConfig.from_hf(config), tokenizer)
    save_weights(path, spec.shards, weights)


def _config(spec: CheckpointSpec) -> dict[str, Any]:
    dtype = str(spec.dtype).removeprefix("torch.")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.hidden // spec.heads,
        "max_position_embeddings": spec.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": spec.tied,
        **_SPECIAL_IDS,
    }
    if spec.old_config:
        return config | {
            "torch_dtype": dtype,
            "rope_theta": ROPE_THETA,
            "rope_scaling": spec.rope_scaling,
        }
    scaling = spec.rope_scaling or {"rope_type": "default"}
    return config | {"dtype": dtype, "rope_parameters": {"rope_theta": ROPE_THETA, **scaling}}


def _weights(
    spec: CheckpointSpec, config: ModelConfig, tokenizer: Tokenizer
) -> dict[str, torch.Tensor]:
    """Each tensor has its own random stream, so it depends only on its shape and place."""
    weights: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(config.expected_tensors().items()):
        random = np.random.default_rng([spec.seed, index])
        tensor = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        if len(shape) == 1:
            tensor = 1 + tensor / 10
        else:
            tensor *= _deviation(name, shape[1], spec.tied)
        if name == (EMBEDDING if spec.tied else HEAD):
            tensor *= _voices(random, spec.vocab_size, tokenizer)[:, None]
        weights[name] = tensor.to(spec.dtype)
    return weights


def _deviation(name: str, fan_in: int, tied: bool) -> float:
    if name == EMBEDDING and not tied:
        return 1.0
    gain = HEAD_GAIN if name in (EMBEDDING, HEAD) else GAINS.get(name.split(".")[-2], 1.0)
    return float(gain / fan_in**0.5)


def _voices(random: np.random.Generator, vocab_size: int, tokenizer: Tokenizer) -> torch.Tensor:
    """[vocab_size] lengths of the tokens' rows in the head: about 1 for words and their parts."""
    spread = torch.from_numpy(random.standard_normal(vocab_size, dtype=np.float32))
    voices = torch.exp(VOICE_SPREAD * spread)
    for token in range(vocab_size):
        text = tokenizer.decode([token])
        if not (text.isascii() and text.strip(" ").isalpha()):
            voices[token] = QUIET
    return voices


def save_weights(path: Path, shards: int, weights: dict[str, torch.Tensor]) -> None:
    """Writes the weights into the directory `path`, in this number of files."""
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata=metadata)
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: weights[name] for name in part}, path / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
