"""A LoRA adapter on disk, as PEFT saves it: adapter_config.json and adapter_model.safetensors.

An adapter adds b (a x), scaled, to products of its base's layers (LoRA; Hu et al. 2021, section 4).
It is packed as a model of one block. Its manifest says which model it belongs to.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.node.checkpoints.architecture import AnyConfig
from services.node.checkpoints.checkpoint import (
    Checkpoint,
    check_directory,
    check_dtypes,
    read_json,
    some,
)
from services.node.checkpoints.config import ModelConfig, Shapes
from services.node.checkpoints.packing import UnitTensor
from services.node.checkpoints.safetensors_header import StoredTensor, read_header
from shared.errors import CorruptCheckpoint, MissingTensor, UnsafeCheckpoint, UnsupportedModel
from shared.ids import ModelId
from shared.layout import Manifest

ARCHITECTURE = "LoraAdapter"
CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MOST_RANK = 512
TARGETS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linear layers of a decoder's layer that an adapter may change."""
A, B = ".lora_A.weight", ".lora_B.weight"
_WRAPPED = "base_model.model."
"""What PEFT puts before the names of the base's modules."""
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "modules_to_save": (None, []),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (None, False),
}
"""Fields of PEFT's config that change what an adapter computes, with the values at which they do
not."""
_OTHER_BASES = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise an adapter that change the base model, too."""


def open_adapter(path: Path, base: ModelId, config: AnyConfig) -> Checkpoint:
    """Reads the adapter directory `path`, for a base model of this config.

    Errors: NotFound, BadInput (not a directory), UnsupportedModel, UnsafeCheckpoint, MissingTensor,
    CorruptCheckpoint. Each names the field or tensor at fault.
    """
    check_directory(path)
    raw = read_json(path / CONFIG)
    if not isinstance(config, ModelConfig):
        raise UnsupportedModel(f"{path}: model {base} is no decoder, and takes no adapters")
    rank, alpha = _rank_and_alpha(path, raw)
    found = _weights(path)
    pairs = _pairs(path, found)
    if not pairs:
        raise CorruptCheckpoint(f"{path / WEIGHTS}: there is no tensor of an adapter")
    shapes = _shapes(path, pairs, rank, config)
    names = {name: original for pair in pairs.values() for name, original in pair.items()}
    for name, shape in shapes.items():
        if (has := found[names[name]].shape) != shape:
            raise CorruptCheckpoint(
                f"{path}: tensor {names[name]} has shape {list(has)}; a rank of {rank} and the "
                f"base imply {list(shape)}"
            )
    check_dtypes(path, {names[name]: shape for name, shape in shapes.items()}, found)
    tensors = tuple(UnitTensor(n, found[names[n]].dtype, shape) for n, shape in shapes.items())
    rslora = raw.get("use_rslora") is True
    described = {
        "architectures": [ARCHITECTURE],
        "base": str(base),
        "rank": rank,
        "scaling": alpha / (math.sqrt(rank) if rslora else rank),
    }
    stored: dict[str, tuple[StoredTensor, ...]] = {name: (found[names[name]],) for name in shapes}
    return Checkpoint(config, described, (tensors,), stored, {})


def base_of(manifest: Manifest) -> ModelId | None:
    """The model that an adapter belongs to; None: the manifest is no adapter's."""
    if manifest.architecture != ARCHITECTURE:
        return None
    return ModelId(str(manifest.config.get("base", "")))


def _rank_and_alpha(path: Path, raw: Mapping[str, Any]) -> tuple[int, float]:
    where = path / CONFIG
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{where}: peft_type is {raw.get('peft_type')!r}; supported: 'LORA'")
    for field, plain in _PLAIN.items():
        if field in raw and raw[field] not in plain:
            raise UnsupportedModel(f"{where}: {field} = {raw[field]!r} is not supported")
    begun = raw.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASES):
        raise UnsupportedModel(
            f"{where}: init_lora_weights = {begun!r} changes the base model, too: convert the "
            "adapter to one of the original base (see PEFT's documentation)"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MOST_RANK:
        raise UnsupportedModel(f"{where}: r is {rank!r}; supported: 1 to {MOST_RANK}")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CorruptCheckpoint(f"{where}: lora_alpha is {alpha!r}, no number")
    return rank, float(alpha)


def _weights(path: Path) -> dict[str, StoredTensor]:
    if (path / WEIGHTS).is_file():
        return read_header(path / WEIGHTS)
    if (path / PICKLE).exists():
        raise UnsafeCheckpoint(
            f"{path}: the adapter is pickled only ({PICKLE}), and opening it would run code; save "
            "it with safetensors"
        )
    raise CorruptCheckpoint(f"{path}: there is no {WEIGHTS}")


def _pairs(path: Path, found: Mapping[str, StoredTensor]) -> dict[str, dict[str, str]]:
    """For each module its two tensors: our name, and the file's."""
    pairs: dict[str, dict[str, str]] = {}
    for original in found:
        name = original.removeprefix(_WRAPPED)
        end = next((end for end in (A, B) if name.endswith(end)), None)
        if end is None:
            raise UnsupportedModel(
                f"{path}: tensor {original} is neither a module's {A[1:]} nor its {B[1:]}"
            )
        pairs.setdefault(name.removesuffix(end), {})[name] = original
    return pairs


def _shapes(
    path: Path, pairs: Mapping[str, Mapping[str, str]], rank: int, config: ModelConfig
) -> Shapes:
    """The shapes of all tensors, in the order of the base's layers."""
    matrices = {module: shape for module, shape in linear_shapes(config).items() if module in pairs}
    if unknown := [module for module in pairs if module not in matrices]:
        raise UnsupportedModel(
            f"{path}: the adapter changes {len(unknown)} modules that cannot be adapted in this "
            f"base: {some(unknown)}; supported: {', '.join(TARGETS)}"
        )
    shapes: Shapes = {}
    for module, (outputs, inputs) in matrices.items():
        for name in (module + A, module + B):
            if name not in pairs[module]:
                raise MissingTensor(f"{path}: tensor {name} is missing")
        shapes[module + A], shapes[module + B] = (rank, inputs), (outputs, rank)
    return shapes


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each linear layer of the base that may be adapted, by its name."""
    found: dict[str, tuple[int, int]] = {}
    for layer in range(config.n_layers):
        tensors = config.unit_tensors(layer + 1)
        for target in TARGETS:
            module = f"model.layers.{layer}.{target}"
            if (shape := tensors.get(f"{module}.weight")) is not None:
                found[module] = (shape[0], shape[1])
    return found


def memory_of(manifest: Manifest) -> int:
    """About how many bytes an adapter takes in memory: float32, whatever its file has."""
    itemsize = {"float32": 4}
    return sum(
        4 * tensor.nbytes // itemsize.get(tensor.dtype, 2)
        for block in manifest.blocks
        for tensor in block.tensors
    )
