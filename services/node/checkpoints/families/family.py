"""What tells one family of decoders from another, as data.

Common to all: RMS norms before attention and MLP, rotary positions, grouped-query attention, a
gated MLP with SiLU, and the tensor names of Llama.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.node.checkpoints.families.windows import Window, no_window
from services.node.checkpoints.raw_config import RawConfig

Flag = bool | str
"""Yes, no, or the key in config.json that says which (missing: no)."""

ROUTER = "mlp.gate.weight"
"""[experts, hidden]."""
GATE_UP = "mlp.experts.gate_up_proj"
"""[experts, 2 x intermediate, hidden]: of each expert first gate, then up."""
DOWN = "mlp.experts.down_proj"
"""[experts, hidden, intermediate]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of a layer's MLP. Strings are keys of config.json."""

    count: tuple[str, ...]
    """Any of these."""
    per_token: str
    intermediate_size: str
    normalized: Flag
    """The chosen experts' weights are made to sum to 1."""
    in_layer: Callable[[RawConfig, int], bool]
    """Whether the layer (from 0) has experts, not a plain MLP."""
    stored: Mapping[str, tuple[str, ...]]
    """How checkpoints before transformers 5 (and by default after) store ROUTER, GATE_UP and DOWN:
    in these tensors one after the other, for each expert in the place of `{}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    architecture: str
    """As in config.json's `architectures`."""
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False
    """Each head's query and key is normed before it is rotated."""
    window: Window = no_window
    experts: Experts | None = None
    head_dim: int | None = None
    """What a config without head_dim means; None: hidden_size divided among the heads."""
    rope_theta: float = 10000.0
    """What a config without rope_theta means."""
