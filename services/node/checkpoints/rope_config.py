"""Reads the rotary embeddings of a config.json, in both generations of configs."""

import math
from dataclasses import dataclass

from services.node.checkpoints.raw_config import RawConfig, flag, given, integer, number
from shared.errors import CorruptCheckpoint, UnsupportedModel

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`default` does not use `factor`. The other fields are used by the kinds that they name."""

    theta: float
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    original_context_length: int = 8192
    """llama3, yarn: the context length that the model was first trained for."""
    low_freq_factor: float = 1.0
    """llama3, like the next field."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """yarn, like all fields that follow: pairs that turn at least this often in the original
    context are kept."""
    beta_slow: float = 1.0
    """Pairs that turn at most this often are interpolated."""
    whole_pairs: bool = True
    """Whether the ends of the ramp between the two are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """Queries and keys are both multiplied by this."""


def read_rope(config: RawConfig, default_theta: float) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling` (whose kind may be under
    `type`).

    `default_theta`: the meaning of a missing rope_theta. UnsupportedModel names the kind.
    """
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.get(key)
    if rope is None:
        rope = {}
    if not isinstance(rope, dict):
        raise CorruptCheckpoint(f"config.json: {key} must be an object, not {rope!r}")
    both = given(config) | given(rope)
    theta = number({"rope_theta": default_theta} | both, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if number({"partial_rotary_factor": 1.0} | both, "partial_rotary_factor") != 1.0:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    if kind in ("default", "dynamic"):
        # Dynamic NTK scaling begins past max_position_embeddings, where requests end here: a
        # position's key would depend on how long its sequence was when it was cached.
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, number(rope, "factor", within=key))
    original = integer(
        {"original_max_position_embeddings": config.get("max_position_embeddings")} | both,
        "original_max_position_embeddings",
        within=key,
    )
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            number(rope, "factor", within=key),
            original,
            low_freq_factor=number(rope, "low_freq_factor", within=key),
            high_freq_factor=number(rope, "high_freq_factor", within=key),
        )
    return _yarn(rope, key, theta, original)


def _yarn(rope: RawConfig, key: str, theta: float, original: int) -> RopeConfig:
    factor = number(rope, "factor", within=key)
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": _mscale(factor, 1.0)}
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale = number(rope, "mscale", within=key)
        all_dim = number(rope, "mscale_all_dim", within=key)
        defaults["attention_factor"] = _mscale(factor, mscale) / _mscale(factor, all_dim)
    rope = defaults | given(rope)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=number(rope, "beta_fast", within=key),
        beta_slow=number(rope, "beta_slow", within=key),
        whole_pairs=flag(rope, "truncate", within=key, missing=True),
        attention_factor=number(rope, "attention_factor", within=key),
    )


def _mscale(factor: float, mscale: float) -> float:
    """YaRN (Peng et al. 2023, section 3.4): longer contexts need a lower temperature."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
