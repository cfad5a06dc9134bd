"""Reads an image classifier's config.json: a ViT (Dosovitskiy et al. 2021) with a classifier.

Its units are the embeddings of the patches, the layers, and the final norm with the classifier.
"""

from dataclasses import dataclass

from services.node.checkpoints.config import Shapes, linears, read_dtype, refuse_quantized
from services.node.checkpoints.raw_config import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    RawConfig,
    flag,
    given,
    integer,
    number,
)
from shared.errors import CorruptCheckpoint, UnsupportedModel
from shared.vision import CHANNELS, PREPROCESSOR, ImageInput, image_input, labels

EMBEDDINGS = "vit.embeddings."
CLASS_TOKEN = EMBEDDINGS + "cls_token"
POSITIONS = EMBEDDINGS + "position_embeddings"
PROJECTION = EMBEDDINGS + "patch_embeddings.projection"
FINAL_NORM = "vit.layernorm"
CLASSIFIER = "classifier"

STORED = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
"""The names that checkpoints have for tensors, by their names in transformers 5's memory."""
ONLY = {
    "hidden_act": "gelu",
    "num_channels": CHANNELS,
    "problem_type": "single_label_classification",
}
DEFAULTS = {
    **ONLY,
    "layer_norm_eps": 1e-12,
    "qkv_bias": True,
    "image_size": 224,
    "patch_size": 16,
}
"""The meaning of a config without the key."""


@dataclass(frozen=True, slots=True)
class VitConfig:
    """An encoder of `n_layers + 2` units: embeddings, layers, and final norm with the classifier.

    A sequence is an image: one position for each patch, and one for the class token.
    """

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    norm_eps: float
    qkv_bias: bool
    patch_size: int
    """Height and width of a patch, in pixels."""
    image: ImageInput
    n_labels: int
    dtype: str
    """The dtype that the config declares, one of DTYPES."""

    @classmethod
    def from_hf(cls, config: RawConfig) -> "VitConfig":
        """Reads the config of a manifest, which includes the preprocessor's. UnsupportedModel names
        what is not supported, CorruptCheckpoint the key at fault."""
        config = DEFAULTS | given(config)
        _refuse_unsupported(config)
        image = image_input(config)
        hidden_size = integer(config, "hidden_size")
        n_heads = integer(config, "num_attention_heads", most=MOST_HEADS)
        if hidden_size % n_heads:
            raise CorruptCheckpoint(
                f"config.json: hidden_size {hidden_size} is not a multiple of "
                f"num_attention_heads {n_heads}"
            )
        if hidden_size // n_heads > MOST_HEAD_DIM:
            raise CorruptCheckpoint(
                f"config.json: heads of {hidden_size // n_heads}, at most {MOST_HEAD_DIM} works"
            )
        return cls(
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            n_layers=integer(config, "num_hidden_layers", most=MOST_LAYERS),
            n_heads=n_heads,
            norm_eps=number(config, "layer_norm_eps"),
            qkv_bias=flag(config, "qkv_bias"),
            patch_size=_patch_size(config, image),
            image=image,
            n_labels=len(labels(config)),
            dtype=read_dtype(config),
        )

    @property
    def n_patches(self) -> int:
        return (self.image.size // self.patch_size) ** 2

    @property
    def context_length(self) -> int:
        """The positions of an image."""
        return self.n_patches + 1

    @property
    def n_units(self) -> int:
        return self.n_layers + 2

    @property
    def ignored(self) -> frozenset[str]:
        """See `ModelConfig.ignored`."""
        return frozenset()

    def unit_tensors(self, unit: int) -> Shapes:
        """The unit's tensors with their shapes, in the order in which they are packed."""
        hidden = self.hidden_size
        if unit == 0:
            patch = (hidden, CHANNELS, self.patch_size, self.patch_size)
            return {
                CLASS_TOKEN: (1, 1, hidden),
                POSITIONS: (1, self.context_length, hidden),
                **linears(EMBEDDINGS + "patch_embeddings", {"projection": patch}, True),
            }
        if unit == self.n_units - 1:
            shape = (self.n_labels, hidden)
            return {
                **_norm(FINAL_NORM, hidden),
                CLASSIFIER + ".weight": shape,
                CLASSIFIER + ".bias": shape[:1],
            }
        layer = f"vit.layers.{unit - 1}."
        attention, mlp = layer + "attention", layer + "mlp"
        square, wide = (hidden, hidden), (self.intermediate_size, hidden)
        qkv: Shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), square)
        return {
            **_norm(layer + "layernorm_before", hidden),
            **linears(attention, qkv, self.qkv_bias),
            **linears(attention, {"o_proj": square}, True),
            **_norm(layer + "layernorm_after", hidden),
            **linears(mlp, {"fc1": wide}, True),
            **linears(mlp, {"fc2": wide[::-1]}, True),
        }

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[Shapes, ...]:
        """See `ModelConfig.sources`."""
        prefix, found, rest = name.partition("vit.layers.")
        if not found or prefix:
            return ({name: shape},)
        layer, _, tensor = rest.partition(".")
        linear, _, kind = tensor.rpartition(".")
        stored = f"vit.encoder.layer.{layer}.{STORED.get(linear, linear)}.{kind}"
        return ({name: shape}, {stored: shape})


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _refuse_unsupported(config: RawConfig) -> None:
    for key, only in ONLY.items():
        if config[key] != only:
            raise UnsupportedModel(f"{key} {config[key]!r} is not supported; only {only}")
    refuse_quantized(config)


def _patch_size(config: RawConfig, image: ImageInput) -> int:
    """The patch size. Images must have the size that the positions were learned for: positions are
    not interpolated."""
    for key in ("image_size", "patch_size"):
        if isinstance(config[key], list):
            raise UnsupportedModel(f"{key} {config[key]} is not supported; only a square's side")
    patch_size, image_size = integer(config, "patch_size"), integer(config, "image_size")
    if image_size != image.size:
        raise UnsupportedModel(
            f"{PREPROCESSOR} makes images of {image.size} pixels, config.json has image_size "
            f"{image_size}: interpolated position embeddings are not supported"
        )
    if image_size % patch_size:
        raise UnsupportedModel(
            f"image_size {image_size} that is not a multiple of patch_size {patch_size} is not "
            f"supported"
        )
    return patch_size
