"""Mixtures of experts: each row goes through the few experts that its router chooses.

A row's result does not depend on the batch (see attention.py): the results of its experts are
summed in the order of the experts, in float32.
"""

from collections.abc import Callable

import torch

from services.node.checkpoints.config import ExpertsConfig
from services.node.engine.weights import ExpertMlp

AddExperts = Callable[[torch.Tensor, torch.Tensor, ExpertMlp, ExpertsConfig], None]


def add_experts(
    hidden: torch.Tensor,
    normed: torch.Tensor,
    mlp: ExpertMlp,
    config: ExpertsConfig,
) -> None:
    """Adds the output of the experts for `normed` to `hidden`, both [rows, hidden_size]."""
    weights, chosen = (each.flatten() for each in route(normed, mlp, config))
    by_expert = chosen.argsort(stable=True)
    rows, weights = by_expert // config.per_token, weights[by_expert, None]
    total = torch.zeros_like(hidden, dtype=torch.float32)
    stop = 0
    for expert, count in enumerate(torch.bincount(chosen).tolist()):
        start, stop = stop, stop + count
        if count:
            own = rows[start:stop]
            made = mlp.down[expert](mlp.gate_up[expert](normed[own])).float()
            total.index_add_(0, own, made * weights[start:stop])
    hidden += total


def route(
    normed: torch.Tensor, mlp: ExpertMlp, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights in float32, experts) of each row, both [rows, per_token]."""
    logits = mlp.router(normed.float())
    weights, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(config.per_token)
    if config.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen
