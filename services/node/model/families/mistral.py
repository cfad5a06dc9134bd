"""Mistral: Llama with a sliding window (which later releases have set to null)."""

from services.node.model.families.family import Family
from services.node.model.families.windows import all_layers_or_4096

MISTRAL = Family(architecture="MistralForCausalLM", window=all_layers_or_4096)
