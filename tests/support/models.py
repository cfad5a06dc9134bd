"""Tiny real checkpoints; vary them with `dataclasses.replace(TINY, ...)`."""

from services.local.demo_model import CheckpointSpec

TINY = CheckpointSpec(
    layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=512
)
"""6 units, 0.6 MB in fp32; made by `services.local.demo_model.make_checkpoint(path, TINY)`."""

WIDE = CheckpointSpec(
    layers=2, hidden=136, intermediate=640, heads=4, kv_heads=2, vocab_size=320, context_length=64
)
"""4 units, 3 MB: blocks of several chunks, tensors that lie across their borders, and padding."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
