"""Reads the config.json of an encoder of texts: BERT (Devlin et al. 2018), which gives vectors.

Its layers are normed after attention and MLP. So that its last unit has a norm, as that of other
models, the norm at a layer's end belongs to the unit after it: a layer's unit begins with the norm
of what comes in. Between units, states are not normed.
"""

from dataclasses import dataclass

from services.node.checkpoints.config import Shapes, linears, read_dtype, refuse_quantized
from services.node.checkpoints.raw_config import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    RawConfig,
    given,
    integer,
    number,
)
from shared.errors import CorruptCheckpoint, UnsupportedModel

WORDS, POSITIONS, TYPES = (
    f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
)
UNUSED = frozenset({"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"})
"""Tensors that checkpoints may have and vectors are not made of: numbers from 0 on, and the layer
with which BERT was trained to tell whether two sentences follow each other."""
ONLY = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
DEFAULTS = {**ONLY, "layer_norm_eps": 1e-12, "type_vocab_size": 2}
"""The meaning of a config without the key."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """An encoder of `n_layers + 2` units: embeddings, layers, and the last norm."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    norm_eps: float
    n_types: int
    """Kinds of tokens in the checkpoint; a text's are all of the first kind."""
    context_length: int
    """The positions that the checkpoint has embeddings for."""
    dtype: str
    """The dtype that the config declares, one of DTYPES."""

    @classmethod
    def from_hf(cls, config: RawConfig) -> "BertConfig":
        """Reads a config.json. UnsupportedModel names what is not supported, CorruptCheckpoint the
        key at fault."""
        config = DEFAULTS | given(config)
        for key, only in ONLY.items():
            if config[key] != only:
                raise UnsupportedModel(f"{key} {config[key]!r} is not supported; only {only}")
        refuse_quantized(config)
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
            vocab_size=integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            n_layers=integer(config, "num_hidden_layers", most=MOST_LAYERS),
            n_heads=n_heads,
            norm_eps=number(config, "layer_norm_eps"),
            n_types=integer(config, "type_vocab_size"),
            context_length=integer(config, "max_position_embeddings"),
            dtype=read_dtype(config),
        )

    @property
    def n_units(self) -> int:
        return self.n_layers + 2

    @property
    def ignored(self) -> frozenset[str]:
        """See `ModelConfig.ignored`."""
        return UNUSED

    def unit_tensors(self, unit: int) -> Shapes:
        """The unit's tensors with their shapes, in the order in which they are packed."""
        hidden = self.hidden_size
        if unit == 0:
            return {
                WORDS: (self.vocab_size, hidden),
                POSITIONS: (self.context_length, hidden),
                TYPES: (self.n_types, hidden),
            }
        incoming = self._norm(incoming_norm(unit))
        if unit == self.n_units - 1:
            return incoming
        layer = layer_prefix(unit)
        qkv: Shapes = dict.fromkeys(("query", "key", "value"), (hidden, hidden))
        wide = (self.intermediate_size, hidden)
        return {
            **incoming,
            **linears(layer + "attention.self", qkv, True),
            **linears(layer + "attention.output", {"dense": (hidden, hidden)}, True),
            **self._norm(layer + "attention.output.LayerNorm"),
            **linears(layer + "intermediate", {"dense": wide}, True),
            **linears(layer + "output", {"dense": wide[::-1]}, True),
        }

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[Shapes, ...]:
        """See `ModelConfig.sources`."""
        return ({name: shape},)

    def _norm(self, name: str) -> Shapes:
        return {f"{name}.weight": (self.hidden_size,), f"{name}.bias": (self.hidden_size,)}


def layer_prefix(unit: int) -> str:
    """How the names of the tensors of a layer's unit begin."""
    return f"encoder.layer.{unit - 1}."


def incoming_norm(unit: int) -> str:
    """The norm of what comes into a unit: that of the embeddings, or of the layer before."""
    return "embeddings.LayerNorm" if unit == 1 else layer_prefix(unit - 1) + "output.LayerNorm"
