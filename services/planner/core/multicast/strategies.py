"""The multicast strategies by the names that users give them, and a bound that none of them can
beat."""

from collections.abc import Callable, Mapping

from services.planner.core.multicast.baselines import broadcast_moves, chain_moves, tree_moves
from services.planner.core.multicast.fabric import Task
from services.planner.core.multicast.groups import binomial_moves, head_moves, split
from services.planner.core.multicast.reduction import Core, check_task, complete, core_of
from services.planner.core.multicast.schedule import Move, Schedule
from services.planner.core.multicast.taps import taps_moves
from shared.errors import BadInput

Strategy = Callable[[Task], Schedule]
"""Plans a task. BadInput for a task that makes no sense; PlanError if none of its sources may
send."""


def _binomial(core: Core) -> list[Move]:
    return binomial_moves(split(core.sources, core.relays, core.task.blocks))


def _head(core: Core) -> list[Move]:
    return head_moves(split(core.sources, core.relays, core.task.blocks))


def _chain(core: Core) -> list[Move]:
    return chain_moves(core.task, core.sources, core.relays)


def _tree(core: Core) -> list[Move]:
    return tree_moves(split(core.sources, core.relays, core.task.blocks), core.task.blocks)


def _broadcast(core: Core) -> list[Move]:
    return broadcast_moves(core.task, core.sources, core.relays)


def _local(task: Task) -> Schedule:
    """Moves nothing: every destination loads by itself (ServerlessLLM's disk or host cache)."""
    check_task(task)
    return Schedule(task.nodes, task.blocks, task.sources, (), own=task.destinations)


def _strategy(moves: Callable[[Core], list[Move]], *, forms_group: bool = False) -> Strategy:
    """Extends a strategy for nodes that send and receive to any task."""

    def plan(task: Task) -> Schedule:
        core = core_of(task)
        all_moves = complete(core, moves(core))
        setup_s = task.group_setup_s if forms_group and all_moves else 0.0
        return Schedule(task.nodes, task.blocks, task.sources, all_moves, setup_s=setup_s)

    return plan


DEFAULT = "binomial"
LOCAL = "local"
STRATEGIES: Mapping[str, Strategy] = {
    "binomial": _strategy(_binomial),
    "head": _strategy(_head),
    "chain": _strategy(_chain),
    "taps": _strategy(taps_moves),
    "tree": _strategy(_tree),
    "broadcast": _strategy(_broadcast, forms_group=True),
    LOCAL: _local,
}


FORMS_GROUP = frozenset({"broadcast"})
"""Strategies whose nodes form a group before anything moves, so that none can be appended."""


def strategy(name: str) -> Strategy:
    if name not in STRATEGIES:
        raise BadInput(f"no multicast algorithm {name!r}: use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def lower_bound(nodes: int, blocks: int, sources: int) -> int:
    """The fewest steps that any schedule can take: b + ceil(log2(N/k)) - 1 (0 if k = N).

    The holders of a block at best double in a step. So the last destination gets its first block at
    step ceil(log2(N/k)) or later, and then one block in each step.
    """
    if nodes <= sources:
        return 0
    return blocks + (-(-nodes // sources) - 1).bit_length() - 1
