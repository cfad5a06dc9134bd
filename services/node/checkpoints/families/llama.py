"""Llama 2, 3 and 3.x, and models that share their architecture."""

from services.node.checkpoints.families.family import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
)
