"""Rules that say which layers have a sliding window, and how wide it is.

A rule is called for each layer, counted from 0, and returns how many positions a query sees, its
own included. 0 means all positions before it.
"""

from collections.abc import Callable

from services.node.checkpoints.raw_config import RawConfig, flag, given, integer
from shared.errors import CorruptCheckpoint, UnsupportedModel

Window = Callable[[RawConfig, int], int]


def no_window(config: RawConfig, layer: int) -> int:
    return 0


def all_layers(config: RawConfig, layer: int) -> int:
    """`sliding_window`; null means no window."""
    return 0 if config.get("sliding_window") is None else integer(config, "sliding_window")


def all_layers_or_4096(config: RawConfig, layer: int) -> int:
    """`sliding_window`; a config without the key means 4096."""
    return all_layers({"sliding_window": 4096, **config}, layer)


def all_layers_if_used(config: RawConfig, layer: int) -> int:
    """`sliding_window` (a config without the key means 4096), but only if `use_sliding_window` is
    true."""
    return all_layers_or_4096(config, layer) if flag(config, "use_sliding_window") else 0


def upper_layers_if_used(config: RawConfig, layer: int) -> int:
    """A window only in the layers that `layer_types` names or, without that key, from layer
    `max_window_layers` on."""
    window = all_layers_if_used(config, layer)
    if config.get("layer_types") is not None:
        return window if _slides(config["layer_types"], layer) else 0
    first = integer({"max_window_layers": 28} | given(config), "max_window_layers", least=0)
    return window if layer >= first else 0


def _slides(types: object, layer: int) -> bool:
    if not isinstance(types, list) or layer >= len(types):
        raise CorruptCheckpoint(
            f"config.json: layer_types must list a type for every layer, not {types!r}"
        )
    if types[layer] not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(
            f"layer type {types[layer]!r} is not supported; supported: full_attention, "
            f"sliding_attention"
        )
    return bool(types[layer] == "sliding_attention")
