"""Both generations of configs, what the families read from them, and what is refused."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.node.checkpoints.config import LayerConfig, ModelConfig
from services.node.checkpoints.rope_config import RopeConfig
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
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 64}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
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


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe", "mistral"])
@pytest.mark.parametrize("window", [{}, {"sliding_window": None}])
def test_keys_that_are_left_out_mean_what_they_mean_to_transformers(
    model_type: str, window: dict[str, None]
) -> None:
    given = OLD | {
        "max_position_embeddings": 8192,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        **window,
    }
    theirs = AutoConfig.for_model(model_type, **given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    ours = ModelConfig.from_hf(given | {"architectures": [type(model).__name__]})
    attentions = [layer.self_attn for layer in model.model.layers]
    assert [ours.head_dim] * 2 == [attention.head_dim for attention in attentions]
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 2
    widths = [theirs.sliding_window if kind == "sliding_attention" else None for kind in types]
    assert [layer.window or None for layer in ours.layers] == widths


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
    assert new.rope == RopeConfig(500000.0, "llama3", 8.0, 64, 1.0, 4.0)


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


def test_yarn_as_qwen_has_it() -> None:
    """The length before it is both the config's and the default of the scaling's."""
    config = read(
        max_position_embeddings=64,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    )
    assert config == read(
        max_position_embeddings=64, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    )
    assert config.context_length == 256
    rope = config.rope
    assert (rope.kind, rope.factor, rope.original_context_length) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_dynamic_scaling_begins_where_requests_end() -> None:
    scaled = read(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert (scaled.rope, scaled.context_length) == (RopeConfig(500000.0), 512)


def test_a_theta_that_is_not_given_is_the_familys() -> None:
    assert read(rope_theta=None).rope.theta == 10000.0
    mixtral = {
        "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2
    }  # fmt: skip
    assert read(rope_theta=None, **mixtral).rope.theta == 1000000.0


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, (0, 0)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, (64, 64)),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, (0, 0)),
        ({**QWEN2, "max_window_layers": 1}, (0, 64)),
        ({**QWEN2, "max_window_layers": 0}, (64, 64)),
        (QWEN2, (0, 0)),
        ({**QWEN2, "use_sliding_window": False, "max_window_layers": 0}, (0, 0)),
        ({**QWEN2, "layer_types": ["sliding_attention", "full_attention"]}, (64, 0)),
        ({**QWEN2, "architectures": ["Qwen3ForCausalLM"], "max_window_layers": 1}, (0, 64)),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    """A window as long as the context is none."""
    assert tuple(layer.window for layer in read(**changes).layers) == windows


def test_a_window_that_is_null_is_none() -> None:
    config = ModelConfig.from_hf(
        OLD | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    )
    assert config.layers == (LayerConfig(), LayerConfig())


def test_which_layers_have_experts() -> None:
    config = read(**QWEN3_MOE, mlp_only_layers=[3], decoder_sparse_step=2)
    assert [layer.experts for layer in config.layers] == [False, True, False, False, False, True]
    assert all(layer.experts for layer in read(**QWEN3_MOE).layers)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))])
def test_eos_ids(value: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_ids == ids


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 6}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"moe_intermediate_size": 24, "decoder_sparse_step": 2}),
        ("mixtral", {}),
    ],
)
def test_tensors_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    sizes = {key: value for key, value in OLD.items() if type(value) is int}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **changes))
    theirs = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if changes.get("tie_word_embeddings"):
        del theirs["lm_head.weight"]
    config = ModelConfig.from_hf(
        model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    )
    assert config.expected_tensors() == theirs
    last = config.unit_tensors(config.n_units - 1)
    assert last == {"model.norm.weight": (32,), "lm_head.weight": (96, 32)}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM.*Qwen3Moe"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"torch_dtype": "float64"}, "torch_dtype 'float64'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*llama3, yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({**QWEN2, "layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
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
        ({"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000, at most 1024 works"),
        ({"num_attention_heads": 10**7, "head_dim": 2}, "num_attention_heads is 10000000"),
        ({"head_dim": 10**7}, "heads of 10000000, at most 1024 works"),
        ({"hidden_size": 8192, "num_attention_heads": 2}, "heads of 4096"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({**QWEN3_MOE, "num_experts": 10**6}, "num_experts is 1000000"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
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
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 0}}, "truncate must be true"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types must list"),
        ({**QWEN2, "use_sliding_window": 1}, "use_sliding_window"),
        ({**QWEN2, "max_window_layers": -1}, "max_window_layers must be an integer of at least 0"),
        ({**QWEN3_MOE, "num_experts": None}, "num_experts is missing"),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 of only 8"),
        ({**QWEN3_MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
    ],
)
def test_corrupt(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=what):
        read(**changes)
