"""The differences between families of decoders, as data.

All of them have RMS norms before attention and MLP, rotary positions, grouped-query attention, a
gated MLP with SiLU, and the tensor names of Llama.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.node.checkpoints.families.windows import Window, no_window
from services.node.checkpoints.raw_config import RawConfig

Flag = bool | str
"""Yes, no, or the key in config.json that says which. A missing key means no."""

ROUTER = "mlp.gate.weight"
"""Tensor name of [experts, hidden]."""
GATE_UP = "mlp.experts.gate_up_proj"
"""Tensor name of [experts, 2 x intermediate, hidden]: for each expert first gate, then up."""
DOWN = "mlp.experts.down_proj"
"""Tensor name of [experts, hidden, intermediate]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a layer's MLP. Strings are keys of config.json."""

    count: tuple[str, ...]
    """The possible keys; the first that exists counts."""
    per_token: str
    intermediate_size: str
    normalized: Flag
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    in_layer: Callable[[RawConfig, int], bool]
    """Whether the layer (counted from 0) has experts instead of a plain MLP."""
    stored: Mapping[str, tuple[str, ...]]
    """How checkpoints from before transformers 5 (and by default after) store ROUTER, GATE_UP and
    DOWN: in these tensors one after the other, with the number of each expert in the place of
    `{}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    architecture: str
    """The name in config.json's `architectures`."""
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False
    """Whether each head's query and key is normed before it is rotated."""
    window: Window = no_window
    experts: Experts | None = None
    head_dim: int | None = None
    """The meaning of a config without head_dim. None: hidden_size divided among the heads."""
    rope_theta: float = 10000.0
    """The meaning of a config without rope_theta."""
