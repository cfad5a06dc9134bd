"""The step model once more, apart from the planner's own check, and bounds to compare with."""

import importlib.util
import os
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction
from itertools import combinations, groupby
from pathlib import Path as FilePath
from types import ModuleType

import pytest

from services.planner.core.multicast.schedule import Move, Schedule

ROOT = FilePath(__file__).parents[3]


def replay(held: Sequence[Iterable[int]], moves: Iterable[Move]) -> list[list[set[int]]]:
    """Holdings after every step, 0 included; asserts the rules on the way."""
    history = [[set(have) for have in held]]
    for step, group in groupby(moves, key=lambda move: move.step):
        batch = list(group)
        before = history[-1]
        assert step >= len(history), "steps out of order"
        history.extend([set(have) for have in before] for _ in range(step - len(history) + 1))
        assert len({move.src for move in batch}) == len(batch), f"step {step}: sends twice"
        assert len({move.dst for move in batch}) == len(batch), f"step {step}: receives twice"
        for move in batch:
            assert move.src != move.dst
            assert move.block in before[move.src], f"{move} sends what it lacks"
            assert move.block not in before[move.dst], f"{move} is redundant"
            history[-1][move.dst].add(move.block)
    return history


def replay_schedule(schedule: Schedule) -> list[list[set[int]]]:
    everything = range(schedule.blocks)
    start = [everything if n in schedule.sources else () for n in range(schedule.nodes)]
    history = replay(start, schedule.moves)
    assert all(have == set(everything) for have in history[-1])
    assert len(history) == schedule.steps + 1
    return history


def document(schedule: Schedule) -> dict[str, object]:
    steps: list[list[dict[str, int]]] = [[] for _ in range(schedule.steps)]
    for move in schedule.moves:
        steps[move.step - 1].append({"src": move.src, "dst": move.dst, "block": move.block})
    return {
        "n": schedule.nodes,
        "blocks": schedule.blocks,
        "sources": list(schedule.sources),
        "steps": steps,
    }


def independent_checker() -> ModuleType:
    """`check_schedule.py`, kept beside the repository or named by LS_ORACLE (a folder)."""
    folder = os.environ.get("LS_ORACLE") or ROOT.parent / "shared" / "oracle"
    path = FilePath(folder) / "check_schedule.py"
    if not path.exists():
        pytest.skip(f"the independent schedule checker is not at {path}")
    spec = importlib.util.spec_from_file_location("check_schedule", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def least_steps(held: Sequence[AbstractSet[int]], blocks: int, wanted: Collection[int]) -> int:
    """No schedule from these holdings takes fewer steps.

    A node receives one block a step; holders of a block at best double in a step; a node sends one
    block a step, so that the last of the c blocks that only it holds leaves it in step c or later.
    """
    least = max((blocks - len(held[node]) for node in wanted), default=0)
    lone: dict[int, int] = {}
    for block in range(blocks):
        holders = [node for node, have in enumerate(held) if block in have]
        lacking = sum(block not in held[node] for node in wanted)
        if holders and lacking:
            least = max(least, (-(-(len(holders) + lacking) // len(holders)) - 1).bit_length())
            if len(holders) == 1:
                lone[holders[0]] = lone.get(holders[0], 0) + 1
    return max([least, *lone.values()])


def capacity_bound(held: Sequence[AbstractSet[int]], blocks: int) -> Fraction:
    """Most capacity of any paths: b |A| / |blocks that nobody outside A holds|, least over A.

    By the duality of flows and cuts it is reached where stages are free. Exponential in the nodes.
    """
    bound = Fraction(len(held))
    for size in range(len(held)):
        for chosen in combinations(range(len(held)), size):
            others = [have for node, have in enumerate(held) if node not in chosen]
            only_here = blocks - len(set[int]().union(*others))
            if only_here:
                bound = min(bound, Fraction(blocks * size, only_here))
    return bound
