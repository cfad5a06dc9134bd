"""Models as data: their shapes, from the published config.json, and manifests that stand for them.

A modelled manifest cuts the model into blocks as the packer would, but its blocks hold few bytes:
one real byte stands for `unit` modelled bytes. Those bytes are real, with real digests, so that the
services move and check them as they would move and check weights.
"""

import hashlib
import math
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from services.node.checkpoints.packing import ITEMSIZE, digest, partition
from shared.errors import BadInput
from shared.ids import ModelName, check_model_name
from shared.layout import BlockSpec, Manifest, model_id
from shared.messages.pool import ModelRecord
from simulation.hardware import read_data

DATA = Path(__file__).parent / "data" / "models"

Count = Annotated[int, msgspec.Meta(ge=1)]


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder: embedding, layers with grouped-query attention and a gated MLP, head."""

    name: str
    architecture: str
    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab: Count
    context: Count
    dtype: str
    """A key of `ITEMSIZE`."""
    tied: bool = False
    """Whether the head's weights are the embedding's. A block carries its own copy (see
    packing)."""
    qkv_bias: bool = False

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def layer_parameters(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (q + kv) + (q + 2 * kv if self.qkv_bias else 0)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Includes the final norm."""
        return self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        """Counts tied embeddings once, as is usual."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        return embedding + self.layers * self.layer_parameters + self.head_parameters

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        """Bytes of the embedding, each layer, and the head (`shared.layout`)."""
        embedding = self.vocab * self.hidden
        layers = (self.layer_parameters,) * self.layers
        return tuple(n * self.itemsize for n in (embedding, *layers, self.head_parameters))

    @property
    def nbytes(self) -> int:
        """Bytes of a copy, in memory or on the wire."""
        return sum(self.unit_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token position, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def block_bytes(self, block: BlockSpec) -> int:
        """The bytes that the block stands for."""
        return sum(self.unit_bytes[block.first_unit : block.last_unit + 1])

    def block_layers(self, block: BlockSpec) -> int:
        return min(block.last_unit, self.layers) - max(block.first_unit, 1) + 1

    def config(self) -> dict[str, Any]:
        """The content of the checkpoint's config.json."""
        return {
            "_name_or_path": self.name,
            "architectures": [self.architecture],
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.qkv_bias,
            "torch_dtype": self.dtype,
        }

    @classmethod
    def of(cls, manifest: Manifest) -> "Model":
        """The model that a modelled manifest describes."""
        config = manifest.config
        return cls(
            name=config["_name_or_path"],
            architecture=manifest.architecture,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab=config["vocab_size"],
            context=config["max_position_embeddings"],
            dtype=config["torch_dtype"],
            tied=config["tie_word_embeddings"],
            qkv_bias=config["attention_bias"],
        )


def model(architecture: str, name: str | None = None) -> Model:
    """A model of `data/models`, by the name of its file. `name` renames it.

    ConfigError if there is none, or if its file is wrong.
    """
    read = read_data(DATA, architecture, Model)
    return msgspec.structs.replace(read, name=check_model_name(name or architecture))


def modelled_manifest(model: Model, *, blocks: int, unit: int, chunks: int = 1) -> Manifest:
    """A manifest of `blocks` blocks, the largest of which moves in `chunks` chunks. BadInput if
    that is impossible. A model of another name gets other bytes, and so another model id."""
    if unit < 1 or chunks < 1:
        raise BadInput(f"unit {unit}, {chunks} chunks a block: both must be at least 1")
    sizes = model.unit_bytes
    runs = partition(sizes, blocks)
    scaled = [math.ceil(sum(sizes[first : last + 1]) / unit) for first, last in runs]
    chunk_bytes = math.ceil(max(scaled) / chunks)
    specs = []
    for index, ((first, last), nbytes) in enumerate(zip(runs, scaled, strict=True)):
        view = memoryview(_bytes(model.name, index, nbytes))
        pieces = range(0, nbytes, chunk_bytes)
        digests = tuple(digest(view[start : start + chunk_bytes]) for start in pieces)
        specs.append(BlockSpec(index, first, last, nbytes, (), digests))
    return Manifest(model.architecture, model.config(), chunk_bytes, tuple(specs))


def block_content(manifest: Manifest, block: int) -> bytes:
    """The block's real bytes."""
    return _bytes(manifest.config["_name_or_path"], block, manifest.blocks[block].nbytes)


@lru_cache(maxsize=4096)
def _bytes(name: str, block: int, nbytes: int) -> bytes:
    key = hashlib.sha256(f"{name}/{block}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key))).bytes(nbytes)


def model_record(
    manifest: Manifest,
    *,
    stored: str,
    created_ns: int,
    min_instances: int = 0,
    max_instances: int = 0,
) -> ModelRecord:
    """A record of the model, without a tokenizer. `stored`: the manifest's name in the asset
    store."""
    described = Model.of(manifest)
    return ModelRecord(
        name=ModelName(described.name),
        model_id=model_id(manifest),
        manifest=stored,
        files={},
        nbytes=manifest.nbytes,
        n_blocks=manifest.n_blocks,
        block_bytes=tuple(block.nbytes for block in manifest.blocks),
        context_length=described.context,
        created_ns=created_ns,
        min_instances=min_instances,
        max_instances=max_instances,
        chunk_bytes=manifest.chunk_bytes,
    )
