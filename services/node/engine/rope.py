"""Rotary position embedding: angles by position, in float32 as the models were trained."""

import math

import torch

from services.node.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2], float32: radians a position turns each pair of dimensions by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: slow turns are slowed by `factor`, fast ones kept, those between interpolated."""
    turns = rope.original_context_length * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def rotations(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(cos, sin), each [n, 1, head_dim / 2] float32, ready to broadcast over heads."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos()[:, None], angles.sin()[:, None]
