"""Makes checkpoints of image classifiers (ViT) with random weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.local.demo_model import GAINS, HEAD_GAIN, save_weights, write_json
from services.node.checkpoints.vit_config import CLASS_TOKEN, CLASSIFIER, POSITIONS, VitConfig
from shared.vision import CHANNELS, IN_CONFIG, PREPROCESSOR


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


TINY_VIT = ClassifierSpec(
    layers=4, hidden=64, intermediate=160, heads=4, image_size=32, patch_size=8, labels=10
)
"""6 units, 0.6 MB in fp32, 17 positions; made by `make_classifier(path, TINY_VIT)`."""


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
    write_json(path / "config.json", raw_config)
    write_json(path / PREPROCESSOR, processor)
    save_weights(path, 1, _classifier_weights(spec, config))


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
