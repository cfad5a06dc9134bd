"""Mistral: Llama with a sliding window (which later releases have set to null)."""

from services.node.checkpoints.families.family import Family
from services.node.checkpoints.families.windows import all_layers_or_4096

MISTRAL = Family(architecture="MistralForCausalLM", window=all_layers_or_4096)
