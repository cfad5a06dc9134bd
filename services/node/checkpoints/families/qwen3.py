"""Qwen3: queries and keys are normed, head by head."""

from services.node.checkpoints.families.family import Family
from services.node.checkpoints.families.windows import upper_layers_if_used

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    head_dim=128,
    window=upper_layers_if_used,
)
