"""Mixtures of experts: each row goes through the few experts that its router chooses.

A row's result does not depend on the batch (see attention.py): the results of its experts are
summed in the order of the experts, in float32.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from services.node.checkpoints.config import ExpertsConfig
from services.node.engine.linear import Gate, Linear
from services.node.engine.team import Team
from services.node.engine.weights import ExpertMlp

AddExperts = Callable[[torch.Tensor, torch.Tensor, ExpertMlp, ExpertsConfig], None]


def add_experts(
    hidden: torch.Tensor,
    normed: torch.Tensor,
    mlp: ExpertMlp,
    config: ExpertsConfig,
) -> None:
    """Adds the output of the experts for `normed` to `hidden`, both [rows, hidden_size]."""
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for rows, _, made in _outputs(normed, mlp, config):
        assert made is not None
        total.index_add_(0, rows, made())
    hidden += total


def add_shared_experts(
    hidden: torch.Tensor,
    normed: torch.Tensor,
    mlp: ExpertMlp,
    config: ExpertsConfig,
    team: Team,
    room: torch.Tensor,
) -> None:
    """The same, with ranks that have an expert each, or several. `hidden` is theirs together, and
    `room`, for what experts add: [rows x config.per_token, hidden_size] in float32. Each rank adds
    some columns of it."""
    outputs = [*_outputs(normed, mlp, config)]
    for _, place, made in outputs:
        if made is not None:
            room[place] = made()
    team.meet()
    columns = team.share.outputs(hidden.shape[1])
    own = slice(columns.start, columns.stop)
    total = torch.zeros(len(hidden), len(columns))
    for rows, place, _ in outputs:
        total.index_add_(0, rows, room[place, own])
    hidden[:, own] += total
    team.meet()


def _outputs(
    normed: torch.Tensor, mlp: ExpertMlp, config: ExpertsConfig
) -> Iterator[tuple[torch.Tensor, slice, Callable[[], torch.Tensor] | None]]:
    """Goes through the experts that have rows, in order. Each gives its rows, their place among the
    rows of all experts, and a function that computes their weighted results in float32. The
    function is None if another rank has the expert."""
    weights, chosen = (each.flatten() for each in route(normed, mlp, config))
    by_expert = chosen.argsort(stable=True)
    rows, weights = by_expert // config.per_token, weights[by_expert, None]
    stop = 0
    for expert, count in enumerate(torch.bincount(chosen).tolist()):
        start, stop = stop, stop + count
        if count:
            place, own = slice(start, stop), rows[start:stop]
            if expert in mlp.experts:
                number = expert - mlp.experts.start
                gate_up, down = mlp.gate_up[number], mlp.down[number]
                yield own, place, partial(_result, normed[own], gate_up, down, weights[place])
            else:
                yield own, place, None


def _result(x: torch.Tensor, gate_up: Gate, down: Linear, weights: torch.Tensor) -> torch.Tensor:
    return down(gate_up(x)).float() * weights


def route(
    normed: torch.Tensor, mlp: ExpertMlp, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights in float32, experts) of each row, both [rows, per_token]."""
    logits = mlp.router(normed.float())
    weights, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(config.per_token)
    if config.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen
