"""Reads the config of whichever kind of model a config.json or a manifest describes."""

from services.node.checkpoints.bert_config import BertConfig
from services.node.checkpoints.config import ModelConfig
from services.node.checkpoints.raw_config import RawConfig
from services.node.checkpoints.vit_config import VitConfig
from shared.vectors import is_encoder
from shared.vision import is_classifier

AnyConfig = ModelConfig | VitConfig | BertConfig


def read_config(config: RawConfig) -> AnyConfig:
    """The typed config. UnsupportedModel names what is not supported, CorruptCheckpoint the key at
    fault."""
    if is_classifier(config):
        return VitConfig.from_hf(config)
    return BertConfig.from_hf(config) if is_encoder(config) else ModelConfig.from_hf(config)
