"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from services.node.checkpoints.families.family import Family
from services.node.checkpoints.families.windows import upper_layers_if_used

QWEN2 = Family(architecture="Qwen2ForCausalLM", qkv_bias=True, window=upper_layers_if_used)
