"""Mistral: Llama with a sliding window (which later releases have set to null)."""

from services.node.model.families.family import Family
from services.node.model.families.windows import all_layers
from services.node.model.raw_config import RawConfig


def _window(config: RawConfig, layer: int) -> int:
    """A config without the key means 4096."""
    return all_layers({"sliding_window": 4096, **config}, layer)


MISTRAL = Family(architecture="MistralForCausalLM", window=_window)
