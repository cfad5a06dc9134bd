"""Reads a decoder's config.json: sizes, RoPE, and the tensors it must have.

Both generations of Hugging Face configs are read: `rope_parameters` and `dtype` (transformers 5),
or `rope_theta`, `rope_scaling` and `torch_dtype` (before). `services.node.checkpoints.families`
describes how the families of models differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.node.checkpoints.families import FAMILIES
from services.node.checkpoints.families.family import DOWN, GATE_UP, ROUTER, Experts, Family, Flag
from services.node.checkpoints.raw_config import (
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    RawConfig,
    flag,
    integer,
    number,
)
from services.node.checkpoints.rope_config import RopeConfig, read_rope
from shared.errors import CorruptCheckpoint, UnsupportedModel
from shared.vectors import ENCODER
from shared.vision import CLASSIFIER

DTYPES = ("float32", "bfloat16", "float16")

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The properties in which layers of one model may differ."""

    window: int = 0
    """Positions that a query sees, its own included. 0: all positions before it."""
    experts: bool = False
    """Whether the layer has a mixture of experts in place of the MLP."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's experts are scaled to sum to 1."""
    stored: Mapping[str, tuple[str, ...]]
    """See `families.family.Experts`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of `n_layers + 2` units: embedding, layers, and final norm with the head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """The size of plain MLPs."""
    layers: tuple[LayerConfig, ...]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    context_length: int
    eos_ids: tuple[int, ...]
    """Tokens that end a generation. Empty if the config names none."""
    tied_embeddings: bool
    """Whether the head is the embedding, so that the checkpoint need not store it twice."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether each head's query and key is normed before it is rotated."""
    experts: ExpertsConfig | None
    dtype: str
    """The dtype that the config declares, one of DTYPES."""

    @classmethod
    def from_hf(cls, config: RawConfig) -> "ModelConfig":
        """Reads a config.json. UnsupportedModel names what is not supported, CorruptCheckpoint the
        key at fault."""
        family = _family(config)
        _refuse_unsupported(config)
        hidden_size = integer(config, "hidden_size")
        n_heads = integer(config, "num_attention_heads", most=MOST_HEADS)
        rope = read_rope(config, family.rope_theta)
        context_length = _context_length(config, rope)
        return cls(
            vocab_size=integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(config, "intermediate_size"),
            layers=tuple(
                _layer(config, family, layer, context_length)
                for layer in range(integer(config, "num_hidden_layers", most=MOST_LAYERS))
            ),
            n_heads=n_heads,
            n_kv_heads=_kv_heads(config, n_heads),
            head_dim=_head_dim(config, family, hidden_size, n_heads),
            norm_eps=number(config, "rms_norm_eps"),
            rope=rope,
            context_length=context_length,
            eos_ids=_eos_ids(config),
            tied_embeddings=flag(config, "tie_word_embeddings"),
            qkv_bias=_holds(family.qkv_bias, config),
            o_bias=_holds(family.o_bias, config),
            mlp_bias=_holds(family.mlp_bias, config),
            qk_norm=family.qk_norm,
            experts=_experts(config, family.experts) if family.experts else None,
            dtype=read_dtype(config),
        )

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_units(self) -> int:
        return self.n_layers + 2

    @property
    def ignored(self) -> frozenset[str]:
        """Tensors that a checkpoint may have and the model is not made of. Others are refused."""
        return frozenset({HEAD})

    def unit_tensors(self, unit: int) -> Shapes:
        """The unit's tensors with their shapes, in the order in which they are packed.

        The head's unit always has an `lm_head.weight` of its own, so that it can run on a node
        without the embedding; see `sources`.
        """
        if unit == 0:
            return {EMBEDDING: (self.vocab_size, self.hidden_size)}
        if unit == self.n_units - 1:
            return {FINAL_NORM: (self.hidden_size,), HEAD: (self.vocab_size, self.hidden_size)}
        tensors = self._attention_tensors() | self._mlp_tensors(self.layers[unit - 1])
        return {f"model.layers.{unit - 1}.{name}": shape for name, shape in tensors.items()}

    def expected_tensors(self) -> Shapes:
        """The tensors of a checkpoint that stores each of them in the first way of its
        `sources`."""
        return {
            part: part_shape
            for unit in range(self.n_units)
            for name, shape in self.unit_tensors(unit).items()
            for part, part_shape in self.sources(name, shape)[0].items()
        }

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[Shapes, ...]:
        """The ways in which a checkpoint may store the unit tensor `name`. Each way is a list of
        tensors whose bytes, one after the other, are the unit tensor's. The first way is how
        transformers 5 holds it in memory."""
        if name == HEAD and self.tied_embeddings:
            return ({EMBEDDING: shape},)
        layer, _, kind = name.partition(".mlp.")
        stored = self.experts.stored.get("mlp." + kind) if self.experts else None
        if stored is None or not kind:
            return ({name: shape},)
        if "{}" not in stored[0]:
            return ({name: shape}, {f"{layer}.{stored[0]}": shape})
        count, rows, columns = shape
        return (
            {name: shape},
            {
                f"{layer}.{part.format(expert)}": (rows // len(stored), columns)
                for expert in range(count)
                for part in stored
            },
        )

    def _attention_tensors(self) -> Shapes:
        hidden = self.hidden_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        qkv: Shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        tensors: Shapes = {"input_layernorm.weight": (hidden,)}
        tensors |= linears("self_attn", qkv, self.qkv_bias)
        if self.qk_norm:
            tensors["self_attn.q_norm.weight"] = (self.head_dim,)
            tensors["self_attn.k_norm.weight"] = (self.head_dim,)
        return tensors | linears("self_attn", {"o_proj": (hidden, q)}, self.o_bias)

    def _mlp_tensors(self, layer: LayerConfig) -> Shapes:
        hidden, mlp = self.hidden_size, self.intermediate_size
        tensors: Shapes = {"post_attention_layernorm.weight": (hidden,)}
        if layer.experts:
            assert self.experts is not None
            n, mlp = self.experts.count, self.experts.intermediate_size
            return tensors | {
                ROUTER: (n, hidden),
                GATE_UP: (n, 2 * mlp, hidden),
                DOWN: (n, hidden, mlp),
            }
        gate_up: Shapes = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden)}
        tensors |= linears("mlp", gate_up, self.mlp_bias)
        return tensors | linears("mlp", {"down_proj": (hidden, mlp)}, self.mlp_bias)


def linears(parent: str, weights: Shapes, bias: bool) -> Shapes:
    """Products with the same input. Their weights lie side by side, so that they are applied as
    one."""
    tensors = {f"{parent}.{name}.weight": shape for name, shape in weights.items()}
    if bias:
        tensors |= {f"{parent}.{name}.bias": shape[:1] for name, shape in weights.items()}
    return tensors


def _family(config: RawConfig) -> Family:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(n, str) for n in architectures):
        raise CorruptCheckpoint("config.json: architectures must be a list of names")
    if not architectures:
        raise CorruptCheckpoint("config.json: architectures must be a list with a name in it")
    if architectures[0] not in FAMILIES:
        supported = ", ".join((*FAMILIES, CLASSIFIER, ENCODER))
        raise UnsupportedModel(
            f"architecture {architectures[0]!r} is not supported; supported: {supported}"
        )
    return FAMILIES[architectures[0]]


def _refuse_unsupported(config: RawConfig) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported; only silu")
    refuse_quantized(config)


def refuse_quantized(config: RawConfig) -> None:
    if config.get("quantization_config"):
        raise UnsupportedModel(
            f"quantized checkpoints are not supported; publish one in {', '.join(DTYPES)}"
        )


def _holds(value: Flag, config: RawConfig) -> bool:
    return flag(config, value) if isinstance(value, str) else value


def _context_length(config: RawConfig, rope: RopeConfig) -> int:
    """The longest context in positions. YaRN extends configs that still name the length before
    it."""
    length = integer(config, "max_position_embeddings")
    return (
        max(length, int(rope.factor * rope.original_context_length))
        if rope.kind == "yarn"
        else length
    )


def _layer(config: RawConfig, family: Family, layer: int, context_length: int) -> LayerConfig:
    """The layer's properties. A window as long as the context counts as none."""
    window = family.window(config, layer)
    return LayerConfig(
        window=window if window < context_length else 0,
        experts=family.experts is not None and family.experts.in_layer(config, layer),
    )


def _experts(config: RawConfig, experts: Experts) -> ExpertsConfig:
    given = [key for key in experts.count if config.get(key) is not None]
    count = integer(config, given[0] if given else experts.count[0], most=MOST_EXPERTS)
    per_token = integer(config, experts.per_token)
    if per_token > count:
        raise CorruptCheckpoint(
            f"config.json: {experts.per_token} {per_token} of only {count} experts"
        )
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=integer(config, experts.intermediate_size),
        normalized=_holds(experts.normalized, config),
        stored=experts.stored,
    )


def _kv_heads(config: RawConfig, n_heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return n_heads
    kv_heads = integer(config, "num_key_value_heads", most=MOST_HEADS)
    if n_heads % kv_heads:
        raise CorruptCheckpoint(
            f"config.json: num_attention_heads {n_heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(config: RawConfig, family: Family, hidden_size: int, n_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = integer(config, "head_dim")
    elif family.head_dim is not None:
        head_dim = family.head_dim
    elif hidden_size % n_heads:
        raise CorruptCheckpoint(
            f"config.json: hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {n_heads}, and there is no head_dim"
        )
    else:
        head_dim = hidden_size // n_heads
    if head_dim > MOST_HEAD_DIM:
        raise CorruptCheckpoint(f"config.json: heads of {head_dim}, at most {MOST_HEAD_DIM} works")
    if head_dim % 2:
        raise CorruptCheckpoint(f"config.json: head_dim {head_dim} is odd; RoPE needs an even one")
    return head_dim


def _eos_ids(config: RawConfig) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise CorruptCheckpoint(
                f"config.json: eos_token_id must be a token id or a list of them, not {value!r}"
            )
    return tuple(ids)


def read_dtype(config: RawConfig) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise UnsupportedModel(f"{key} {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return str(value)
