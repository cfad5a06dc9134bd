"""The models and amounts that are measured."""

from dataclasses import dataclass
from typing import Any

from services.node.checkpoints.config import EMBEDDING, HEAD, ModelConfig

ITEMSIZE = 2
SHAPES: dict[str, dict[str, int]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-2-13b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    },
}
"""In bf16."""
TINY = "tiny"


@dataclass(frozen=True, slots=True)
class Scale:
    prompt: int
    """Tokens of the prompt whose time to the first token is measured. Batch 1 decodes behind it."""
    batch: int
    batch_prompt: int
    steps: int
    """Decode steps of a run."""
    read: int
    """Bytes read to see how fast memory is."""
    product: int
    """Rows and columns of the large matrix product."""
    load: int
    """Bytes that go from the host to the device."""
    block: int
    """Bytes of one block of them."""

    @property
    def context(self) -> int:
        return 2 * self.prompt


FULL = Scale(
    prompt=2048, batch=64, batch_prompt=512, steps=32, read=4 << 30, product=8192,
    load=4 << 30, block=256 << 20,
)  # fmt: skip
SMALL = Scale(
    prompt=48, batch=4, batch_prompt=20, steps=4, read=1 << 20, product=64,
    load=1 << 20, block=1 << 18,
)  # fmt: skip


def scale_of(name: str) -> Scale:
    return SMALL if name == TINY else FULL


def raw_config(name: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": scale_of(name).context,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **SHAPES[name],
    }


class Sizes:
    """Sizes of a model in bf16."""

    def __init__(self, config: ModelConfig) -> None:
        sizes: dict[str, int] = {}
        for unit in range(config.n_units):
            for tensor, shape in config.unit_tensors(unit).items():
                size = 1
                for length in shape:
                    size *= length
                sizes[tensor] = size
        self.read = ITEMSIZE * (sum(sizes.values()) - sizes[EMBEDDING])
        """Bytes of weights that a decode step reads: all but the embedding's."""
        self.multiplied = self.read // ITEMSIZE - sizes[HEAD]
        """Weights that each position of a prefill is multiplied with."""
        self.position = ITEMSIZE * 2 * config.n_layers * config.n_kv_heads * config.head_dim
        """Bytes of a position's KV."""
