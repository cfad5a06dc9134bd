"""Muon for the matrices of layers, Adam for everything else."""

from collections import defaultdict

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
STEPS = 5
"""Of Newton's and Schulz's iteration."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024."""


class Muon:
    """Moves each matrix along its momentum's nearest orthogonal matrix: all directions alike."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.momenta = {weight: torch.zeros_like(weight) for weight in weights}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        alike: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for weight, momentum in self.momenta.items():
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 1 - MOMENTUM)
            weight.grad.lerp_(momentum, MOMENTUM)  # Nesterov's
            alike[tuple(weight.shape)].append(weight)
        for (rows, columns), weights in alike.items():
            grads = [weight.grad for weight in weights if weight.grad is not None]
            turned = orthogonal(torch.stack(grads)).float()
            scale = max(1.0, rows / columns) ** 0.5
            for weight, direction in zip(weights, turned, strict=True):
                weight.mul_(1 - 0.02 * rate).sub_(direction, alpha=rate * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns] -> about the nearest matrices whose singular values are all 1."""
    x: Tensor = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
