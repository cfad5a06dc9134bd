"""Typed reads of config.json. CorruptCheckpoint names the key at fault.

A key that is null counts as missing, because exporters mean it so. `within` names the object that
has the key, for the message.
"""

import math
from collections.abc import Mapping
from typing import Any

from shared.errors import CorruptCheckpoint

RawConfig = Mapping[str, Any]
MOST = 1 << 24
"""No size in a config is larger: it would take the memory of whoever reads it, before it can be
held against the tensors that are there."""
MOST_LAYERS, MOST_EXPERTS = 1024, 4096
MOST_HEADS, MOST_HEAD_DIM = 1024, 1024
"""Kernels keep a head's numbers on the stack."""


def given(config: RawConfig) -> dict[str, Any]:
    """The config without keys that are null."""
    return {key: value for key, value in config.items() if value is not None}


def integer(
    config: RawConfig, key: str, within: str = "", *, least: int = 1, most: int = MOST
) -> int:
    value = _required(config, key, within)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise CorruptCheckpoint(f"config.json: {_path(key, within)} must be {kind}, not {value!r}")
    if value > most:
        raise CorruptCheckpoint(
            f"config.json: {_path(key, within)} is {value}, at most {most} works"
        )
    return value


def number(config: RawConfig, key: str, within: str = "") -> float:
    value = _required(config, key, within)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CorruptCheckpoint(
            f"config.json: {_path(key, within)} must be a positive number, not {value!r}"
        )
    return float(value)


def flag(config: RawConfig, key: str, within: str = "", *, missing: bool = False) -> bool:
    value = missing if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise CorruptCheckpoint(
            f"config.json: {_path(key, within)} must be true or false, not {value!r}"
        )
    return value


def _required(config: RawConfig, key: str, within: str) -> Any:
    if config.get(key) is None:
        raise CorruptCheckpoint(f"config.json: {_path(key, within)} is missing")
    return config[key]


def _path(key: str, within: str) -> str:
    return f"{within}.{key}" if within else key
