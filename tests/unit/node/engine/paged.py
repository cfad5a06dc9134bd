"""Shapes and sequences for the tests of attention over pages."""

import random

from services.node.checkpoints.config import ModelConfig
from services.node.core.kv import PAGE, pages_of
from services.node.engine.attention import Span
from services.node.engine.base import SequenceKey
from services.node.engine.kv_sequence import KvSequence
from shared.ids import ModelId

CAPACITY = 64 * PAGE
LONGEST = 300


def config(heads: int, kv_heads: int, head_dim: int, window: int) -> ModelConfig:
    raw = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32,
        "hidden_size": heads * head_dim,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "sliding_window": window or None,
        "torch_dtype": "float32",
    }
    return ModelConfig.from_hf(raw)


def spans_of(lengths: list[tuple[int, int]], rng: random.Random) -> list[Span]:
    """(positions before, count) of each; its pages lie anywhere."""
    free = list(range(CAPACITY // PAGE))
    rng.shuffle(free)
    spans: list[Span] = []
    for first, count in lengths:
        pages = [free.pop() for _ in range(pages_of(first + count))]
        key = SequenceKey(str(len(spans)))
        spans.append(
            (KvSequence(key, ModelId(""), (0, 1), range(1), LONGEST, pages=pages), first, count)
        )
    return spans
