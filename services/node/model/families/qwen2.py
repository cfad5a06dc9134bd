"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from services.node.model.families.family import Family
from services.node.model.families.windows import upper_layers_if_used

QWEN2 = Family(architecture="Qwen2ForCausalLM", qkv_bias=True, window=upper_layers_if_used)
