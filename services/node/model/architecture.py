"""Whichever model a config.json, or a manifest, is of."""

from services.node.model.config import ModelConfig
from services.node.model.raw_config import RawConfig
from services.node.model.vit_config import VitConfig
from shared.vision import is_classifier

AnyConfig = ModelConfig | VitConfig


def read_config(config: RawConfig) -> AnyConfig:
    """UnsupportedModel names what is not supported, CorruptCheckpoint the key at fault."""
    return VitConfig.from_hf(config) if is_classifier(config) else ModelConfig.from_hf(config)
