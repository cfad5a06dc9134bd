"""What the tests of workers over the real engine share."""

from services.node.engine.base import Engine
from services.node.engine.engine import TorchEngine

LONG = tuple((7 * i + i // 5) % 96 for i in range(150))
"""More tokens than are scored at once."""
PROMPTS = ((3,), (9, 8, 7), LONG[:40], LONG)
CLOSE = 1e-4
"""To what transformers compute."""


def torch_engine(kv_tokens: int) -> Engine:
    return TorchEngine("cpu", kv_tokens, threads=1)
