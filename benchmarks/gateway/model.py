"""The model that is served: tiny, because the gateway is measured and not the engine."""

from services.local.demo_model import CheckpointSpec
from shared.ids import ModelName

BENCH = ModelName("bench")
PROMPT = list(range(10, 26))
SPEC = CheckpointSpec(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocab_size=320, context_length=512
)
