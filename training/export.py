"""The trained network as a checkpoint of Hugging Face's form, in bfloat16."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from services.local.demo_model import save_weights, write_json
from services.local.demo_tokenizer import BOS, EOS, tokenizer_config
from training.network import EPSILON, ROPE_THETA, Network


def export(network: Network, tokenizer: Tokenizer, path: Path) -> None:
    shape = network.shape
    path.mkdir(parents=True, exist_ok=True)
    special = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **special,
    }
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", special)
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    (path / "tokenizer_config.json").write_text(tokenizer_config(shape.context_length) + "\n")
    weights = {
        f"model.{name}": weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in network.named_parameters()
    }
    save_weights(path, 1, weights)
