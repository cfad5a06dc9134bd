"""What a decode step of a model has to do, for the planner, which does not know its config."""

from services.node.checkpoints.adapter import base_of
from services.node.checkpoints.architecture import read_config
from services.node.checkpoints.config import EMBEDDING, ModelConfig
from shared.layout import Manifest
from shared.messages.pool import DecodeShape

DIVIDED = {"float32": 4, "bfloat16": 2}
"""The types of weights that ranks divide, and the bytes of one weight."""


def decode_shape(manifest: Manifest) -> DecodeShape | None:
    """None: it is no decoder."""
    if base_of(manifest):
        return None
    config = read_config(manifest.config)
    if not isinstance(config, ModelConfig):
        return None
    tensors = [tensor for block in manifest.blocks for tensor in block.tensors]
    dtype = tensors[0].dtype
    whole = config.experts is not None or dtype not in DIVIDED
    return DecodeShape(
        layers=config.n_layers,
        heads=1 if whole else config.n_kv_heads,
        itemsize=DIVIDED.get(dtype, 2),
        looked_up=sum(tensor.nbytes for tensor in tensors if tensor.name == EMBEDDING),
    )
