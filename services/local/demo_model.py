"""Makes checkpoints of Llama and of image classifiers (ViT) with random weights: real files in
every respect but their training.

They are for trying the system where no model can be downloaded, and for tests. Such a model says
nonsense, but it is a hard case for a serving system: random attention is sharp, so that every token
depends on the whole context, and one wrong byte anywhere changes everything that follows.
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
from services.node.checkpoints.vit_config import CLASS_TOKEN, CLASSIFIER, POSITIONS, VitConfig
from shared.errors import BadInput
from shared.vision import CHANNELS, IN_CONFIG, PREPROCESSOR

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """Sizes of a ViT. The defaults are those of ViT-B."""

    layers: int = 12
    hidden: int = 768
    intermediate: int = 3072
    heads: int = 12
    image_size: int = 224
    patch_size: int = 16
    labels: int = 1000
    dtype: torch.dtype = torch.float32
    seed: int = 0


def make_demo_model(path: Path, *, layers: int = 14, hidden: int = 256, seed: int = 0) -> None:
    """The model of the quick start: 48 MB in fp32, `layers` + 2 units of nearly equal size.

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
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", _SPECIAL_IDS)
    (path / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    (path / "tokenizer_config.json").write_text(tokenizer_config(spec.context_length))
    weights = _weights(spec, ModelConfig.from_hf(config), tokenizer)
    _save(path, spec.shards, weights)


def make_classifier(path: Path, spec: ClassifierSpec) -> None:
    """Writes config, image processor and weights into the directory `path`."""
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": spec.image_size, "width": spec.image_size},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * CHANNELS,
        "image_std": [0.5] * CHANNELS,
    }
    raw_config = _classifier_config(spec)
    config = VitConfig.from_hf(raw_config | {IN_CONFIG: processor})
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", raw_config)
    _write_json(path / PREPROCESSOR, processor)
    _save(path, 1, _classifier_weights(spec, config))


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


def _classifier_config(spec: ClassifierSpec) -> dict[str, Any]:
    labels = [f"class {index}" for index in range(spec.labels)]
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "image_size": spec.image_size,
        "patch_size": spec.patch_size,
        "num_channels": CHANNELS,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "dtype": str(spec.dtype).removeprefix("torch."),
    }


def _classifier_weights(spec: ClassifierSpec, config: VitConfig) -> dict[str, torch.Tensor]:
    """The weights, by their names in checkpoints."""
    tensors = {
        name: shape
        for unit in range(config.n_units)
        for name, shape in config.unit_tensors(unit).items()
    }
    weights: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(tensors.items()):
        random = np.random.default_rng([spec.seed, index])
        tensor = torch.from_numpy(random.standard_normal(shape, dtype=np.float32))
        if len(shape) == 1:
            tensor = tensor / 10 + ("layernorm" in name and name.endswith(".weight"))
        elif name not in (CLASS_TOKEN, POSITIONS):
            kind = name.split(".")[-2]
            gain = HEAD_GAIN if kind == CLASSIFIER else GAINS.get(kind, 1.0)
            tensor *= gain / tensor[0].numel() ** 0.5
        (stored,) = config.sources(name, shape)[-1]
        weights[stored] = tensor.to(spec.dtype)
    return weights


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


def _save(path: Path, shards: int, weights: dict[str, torch.Tensor]) -> None:
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
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
