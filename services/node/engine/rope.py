"""Rotary position embedding: angles by position, in float32 as the models were trained."""

import math

import torch

from services.node.checkpoints.rope_config import RopeConfig

LEAST = 1024
"""The fewest positions whose rotations are kept."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The radians by which each pair of dimensions turns at each position: [head_dim / 2],
    float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's scaling: slow turns are slowed by `factor`, fast ones stay, and the range between
    is interpolated."""
    turns = rope.original_context_length * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (Peng et al. 2023, section 3.2): as `_llama3`, but with a ramp over the pairs."""
    pairs = len(frequencies)
    first = _pair_that_turns(rope.beta_fast, rope, pairs)
    last = _pair_that_turns(rope.beta_slow, rope, pairs)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = max(last - first, 0.001)
    interpolated = (torch.arange(pairs, dtype=torch.float32) - first) / width
    interpolated = interpolated.clamp(0, 1)
    return (1 - interpolated) * frequencies + interpolated * frequencies / rope.factor


def _pair_that_turns(turns: float, rope: RopeConfig, pairs: int) -> float:
    """The pair (as a real number) that turns `turns` times in the original context."""
    frequency = turns * 2 * math.pi / rope.original_context_length
    return -pairs * math.log(frequency) / math.log(rope.theta)


class Rotations:
    """cos and sin of every position that was asked for so far, for kernels that look them up."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        """`frequencies`: see `inverse_frequencies`."""
        self._frequencies = frequencies
        self._made = (torch.empty(0), torch.empty(0))

    def until(self, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions 0 up to `stop` or more, each [positions, head_dim / 2] in
        float32. They stay as they are when more are made."""
        made = len(self._made[0])
        if made < stop:
            positions = torch.arange(max(stop, 2 * made, LEAST))
            cos, sin = rotations(positions, self._frequencies)
            self._made = cos.squeeze(1), sin.squeeze(1)
        return self._made


def rotations(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(cos, sin), each [n, 1, head_dim / 2] in float32, ready to broadcast over heads."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]
