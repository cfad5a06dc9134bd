"""A model of a given size whose blocks are all alike."""

import torch

from services.local.demo_model import CheckpointSpec
from shared.errors import BadInput

CONTEXT = 256
_HIDDEN = (256, 128, 64)
_HEADS, _KV_HEADS = 4, 1
_LEAST_VOCAB = 300
"""The vocabulary that the demo tokenizer needs."""


def checkpoint_spec(nbytes: int, blocks: int) -> CheckpointSpec:
    """A Llama of `blocks` units of the same size (within about a KiB) and of at most `nbytes`.

    BadInput if a unit would be too small for a transformer's layer.
    """
    for hidden in _HIDDEN:
        rows = nbytes // blocks // (2 * hidden)
        attention = 2 * hidden + 2 * hidden * _KV_HEADS // _HEADS
        intermediate = (rows - attention - 2) // 3
        vocab = rows - 1  # the head's unit has a norm as well
        if blocks > 2 and intermediate >= hidden // 4 and vocab >= _LEAST_VOCAB:
            return CheckpointSpec(
                layers=blocks - 2,
                hidden=hidden,
                intermediate=intermediate,
                heads=_HEADS,
                kv_heads=_KV_HEADS,
                vocab_size=vocab,
                context_length=CONTEXT,
                dtype=torch.bfloat16,
            )
    raise BadInput(
        f"{nbytes} bytes make no model of {blocks} blocks: give 3 blocks or more, of "
        f"60 KiB or more each"
    )
