"""What a checkpoint's config.json says of the model: sizes, RoPE, and the tensors it must have.

Reads both generations of Hugging Face configs: `rope_parameters` and `dtype` (transformers 5), or
`rope_theta`, `rope_scaling` and `torch_dtype` (before).
"""

from dataclasses import dataclass
from typing import Any

from shared.errors import CorruptCheckpoint, UnsupportedModel

ARCHITECTURES = ("LlamaForCausalLM",)
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factor` is used by `linear` and `llama3`, the rest by `llama3`."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of `n_layers + 2` units: embedding, layers, and final norm with the head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    context_length: int
    eos_ids: tuple[int, ...]
    """Tokens that end a generation; empty where the config names none."""
    tied_embeddings: bool
    """The head is the embedding; the checkpoint need not store it twice."""
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """What the config declares: one of DTYPES."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelConfig":
        """UnsupportedModel names what is not supported, CorruptCheckpoint the key at fault."""
        _refuse_unsupported(config)
        hidden_size, n_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
        return cls(
            vocab_size=_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_int(config, "intermediate_size"),
            n_layers=_int(config, "num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=_kv_heads(config, n_heads),
            head_dim=_head_dim(config, hidden_size, n_heads),
            norm_eps=_float(config, "rms_norm_eps"),
            rope=_rope(config),
            context_length=_int(config, "max_position_embeddings"),
            eos_ids=_eos_ids(config),
            tied_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
            dtype=_dtype(config),
        )

    @property
    def n_units(self) -> int:
        return self.n_layers + 2

    def unit_tensors(self, unit: int) -> Shapes:
        """The unit's tensors, in the order they are packed in, with their shapes.

        The head's unit always has an `lm_head.weight` of its own, so that it runs on a node that
        does not hold the embedding; see `checkpoint_name`.
        """
        if unit == 0:
            return {EMBEDDING: (self.vocab_size, self.hidden_size)}
        if unit == self.n_units - 1:
            return {FINAL_NORM: (self.hidden_size,), HEAD: (self.vocab_size, self.hidden_size)}
        return self._layer_tensors(f"model.layers.{unit - 1}.")

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's tensor that becomes the unit's tensor `name`."""
        return EMBEDDING if name == HEAD and self.tied_embeddings else name

    def expected_tensors(self) -> Shapes:
        """What the checkpoint must have; tied embeddings are expected once."""
        return {
            self.checkpoint_name(name): shape
            for unit in range(self.n_units)
            for name, shape in self.unit_tensors(unit).items()
        }

    def _layer_tensors(self, prefix: str) -> Shapes:
        hidden, mlp = self.hidden_size, self.intermediate_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        linears = [
            ("self_attn.q_proj", (q, hidden), self.attention_bias),
            ("self_attn.k_proj", (kv, hidden), self.attention_bias),
            ("self_attn.v_proj", (kv, hidden), self.attention_bias),
            ("self_attn.o_proj", (hidden, q), self.attention_bias),
            ("mlp.gate_proj", (mlp, hidden), self.mlp_bias),
            ("mlp.up_proj", (mlp, hidden), self.mlp_bias),
            ("mlp.down_proj", (hidden, mlp), self.mlp_bias),
        ]
        tensors: Shapes = {prefix + "input_layernorm.weight": (hidden,)}
        for name, shape, bias in linears:
            if name == "mlp.gate_proj":
                tensors[prefix + "post_attention_layernorm.weight"] = (hidden,)
            tensors[f"{prefix}{name}.weight"] = shape
            if bias:
                tensors[f"{prefix}{name}.bias"] = shape[:1]
        return tensors


def _refuse_unsupported(config: dict[str, Any]) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CorruptCheckpoint("config.json: architectures must be a list with a name in it")
    if architectures[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {architectures[0]!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported; only silu")
    if config.get("quantization_config"):
        raise UnsupportedModel(
            f"quantized checkpoints are not supported; publish one in {', '.join(DTYPES)}"
        )


def _kv_heads(config: dict[str, Any], n_heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        return n_heads
    kv_heads = _int(config, "num_key_value_heads")
    if n_heads % kv_heads:
        raise CorruptCheckpoint(
            f"config.json: num_attention_heads {n_heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return kv_heads


def _head_dim(config: dict[str, Any], hidden_size: int, n_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = _int(config, "head_dim")
    elif hidden_size % n_heads:
        raise CorruptCheckpoint(
            f"config.json: hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {n_heads}, and there is no head_dim"
        )
    else:
        head_dim = hidden_size // n_heads
    if head_dim % 2:
        raise CorruptCheckpoint(f"config.json: head_dim {head_dim} is odd; RoPE needs an even one")
    return head_dim


def _rope(config: dict[str, Any]) -> RopeConfig:
    """`rope_parameters`, or `rope_theta` with `rope_scaling` (whose kind may be under `type`)."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.get(key)
    if rope is None:
        rope = {}
    if not isinstance(rope, dict):
        raise CorruptCheckpoint(f"config.json: {key} must be an object, not {rope!r}")
    # Configs from before rope_theta existed (first Llama 2 releases) mean 10000.
    theta = _float({"rope_theta": 10000.0} | _given(config) | _given(rope), "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if _float({"partial_rotary_factor": 1.0} | _given(rope), "partial_rotary_factor") != 1.0:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    if kind == "default":
        return RopeConfig(theta)
    factor = _float(rope, "factor", within=key)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    return RopeConfig(
        theta,
        kind,
        factor,
        low_freq_factor=_float(rope, "low_freq_factor", within=key),
        high_freq_factor=_float(rope, "high_freq_factor", within=key),
        original_context_length=_int(rope, "original_max_position_embeddings", within=key),
    )


def _given(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise CorruptCheckpoint(
                f"config.json: eos_token_id must be a token id or a list of them, not {value!r}"
            )
    return tuple(ids)


def _dtype(config: dict[str, Any]) -> str:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(key)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise UnsupportedModel(f"{key} {value!r} is not supported; supported: {', '.join(DTYPES)}")
    return str(value)


def _int(config: dict[str, Any], key: str, within: str = "") -> int:
    value = _required(config, key, within)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptCheckpoint(
            f"config.json: {_path(key, within)} must be a positive integer, not {value!r}"
        )
    return value


def _float(config: dict[str, Any], key: str, within: str = "") -> float:
    value = _required(config, key, within)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CorruptCheckpoint(
            f"config.json: {_path(key, within)} must be a positive number, not {value!r}"
        )
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise CorruptCheckpoint(f"config.json: {key} must be true or false, not {value!r}")
    return value


def _required(config: dict[str, Any], key: str, within: str) -> Any:
    if config.get(key) is None:
        raise CorruptCheckpoint(f"config.json: {_path(key, within)} is missing")
    return config[key]


def _path(key: str, within: str) -> str:
    return f"{within}.{key}" if within else key
