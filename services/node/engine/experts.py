"""Mixtures of experts: each row goes through the few experts that its router chooses.

A row's result does not depend on the batch (see attention.py): an expert's rows are padded to a
multiple of ROWS, and a row's experts are summed in their own order, in float32.
"""

from collections.abc import Callable

import torch

from services.node.engine.attention import pad_rows
from services.node.engine.linear import Linear
from services.node.engine.ops import Ops
from services.node.engine.weights import ExpertMlp
from services.node.model.config import ExpertsConfig

AddExperts = Callable[[torch.Tensor, torch.Tensor, int, ExpertMlp, ExpertsConfig, Ops], None]


def gpu_experts() -> AddExperts:
    """In place of `add_experts`."""
    from services.node.engine import triton_experts  # there need be no Triton elsewhere

    return triton_experts.add_experts


def add_experts(
    hidden: torch.Tensor,
    normed: torch.Tensor,
    n: int,
    mlp: ExpertMlp,
    config: ExpertsConfig,
    ops: Ops,
) -> None:
    """Adds to the first n rows of hidden what the experts make of those rows of normed (both
    [padded rows, hidden_size]). Rows that only pad are not routed: they would cost experts."""
    weights, chosen = route(normed, mlp, config)
    weights, chosen = weights[:n].flatten(), chosen[:n].flatten()
    by_expert = chosen.argsort(stable=True)
    rows, weights = by_expert // config.per_token, weights[by_expert, None]
    total = torch.zeros(n, hidden.shape[1], dtype=torch.float32, device=hidden.device)
    stop = 0
    for expert, count in enumerate(torch.bincount(chosen).tolist()):
        start, stop = stop, stop + count
        if count:
            own = rows[start:stop]
            made = _expert(normed, own, mlp.gate_up[expert], mlp.down[expert], ops)
            total.index_add_(0, own, made * weights[start:stop])
    hidden[:n] += total


def route(
    normed: torch.Tensor, mlp: ExpertMlp, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights in float32, experts) of each row, both [padded rows, per_token]."""
    logits = mlp.router(normed.float())
    weights, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(config.per_token)
    if config.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def _expert(
    normed: torch.Tensor, rows: torch.Tensor, gate_up: Linear, down: Linear, ops: Ops
) -> torch.Tensor:
    """[len(rows), hidden_size] float32."""
    given = normed.new_zeros(pad_rows(len(rows)), normed.shape[1])
    torch.index_select(normed, 0, rows, out=given[: len(rows)])
    return down(ops.silu_times(gate_up(given)))[: len(rows)].float()
