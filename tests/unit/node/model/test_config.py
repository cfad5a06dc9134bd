"""Both generations of Llama configs, and what is refused."""

from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from services.node.model.config import ModelConfig, RopeConfig
from shared.errors import CorruptCheckpoint, UnsupportedModel

OLD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "eos_token_id": [3, 5],
    "hidden_act": "silu",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(**changes: Any) -> ModelConfig:
    """OLD with changes; None removes a key."""
    changed = OLD | changes
    return ModelConfig.from_hf({k: v for k, v in changed.items() if v is not None})


def test_both_generations_say_the_same() -> None:
    new = read(
        rope_theta=None,
        rope_scaling=None,
        torch_dtype=None,
        dtype="bfloat16",
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
    )
    assert new == read()
    assert (new.rope, new.dtype, new.head_dim) == (RopeConfig(500000.0), "bfloat16", 8)


def test_llama3_rope_of_both_generations() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3}
    new = read(rope_theta=None, rope_parameters={"rope_theta": 500000.0, **scaling})
    assert new == read(rope_scaling=scaling)
    assert new.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 64)


def test_the_oldest_form() -> None:
    """No rope_theta, no KV heads; the kind of scaling under `type`."""
    config = read(
        rope_theta=None,
        num_key_value_heads=None,
        torch_dtype=None,
        eos_token_id=2,
        rope_scaling={"type": "linear", "factor": 2},
    )
    assert config.rope == RopeConfig(10000.0, "linear", 2.0)
    assert (config.n_kv_heads, config.eos_ids, config.dtype) == (4, (2,), "float32")


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_eos_ids(value: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_ids == ids


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 6},
    ],
)
def test_tensors_are_those_of_transformers(changes: dict[str, Any]) -> None:
    sizes = {key: value for key, value in OLD.items() if type(value) is int}
    hf = LlamaConfig(**sizes, **changes)
    theirs = {k: tuple(v.shape) for k, v in LlamaForCausalLM(hf).state_dict().items()}
    if changes.get("tie_word_embeddings"):
        del theirs["lm_head.weight"]
    config = read(**changes)
    assert config.expected_tensors() == theirs
    last = config.unit_tensors(config.n_units - 1)
    assert last == {"model.norm.weight": (32,), "lm_head.weight": (96, 32)}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"torch_dtype": "float64"}, "torch_dtype 'float64'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn.*llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_unsupported(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UnsupportedModel, match=what):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": None}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "no head_dim"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling\.factor is missing"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
    ],
)
def test_corrupt(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=what):
        read(**changes)
