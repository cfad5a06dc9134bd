"""The step model with local links and trunks, apart from the planner's own check; and fabrics."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from services.planner.core.multicast.fabric import Fabric, Port, Task
from services.planner.core.multicast.schedule import Schedule


def racks(sizes: Sequence[int], trunk: float = 1.0) -> Fabric:
    """Equal nodes, rack after rack, behind trunks of so many of their links."""
    ports = [Port(1.0, 1.0, f"r{rack}") for rack, size in enumerate(sizes) for _ in range(size)]
    return Fabric(tuple(ports), 0.0, {f"r{rack}": trunk for rack in range(len(sizes))})


def equal_blocks(fabric: Fabric, blocks: int, sources: Sequence[int]) -> Task:
    return Task(fabric, (1,) * blocks, tuple(sources))


def replay_in(
    fabric: Fabric, schedule: Schedule, *, trunk_blocks: int | None = None
) -> list[list[set[int]]]:
    """Holdings after every step; asserts the rules of ports, local links and, if told how many
    blocks a step they carry each way, trunks; and that nothing comes twice and nothing lacks."""
    every = set(range(schedule.blocks))
    history = [[set(every) if n in schedule.sources else set() for n in range(schedule.nodes)]]
    for step, group in groupby(schedule.moves, key=lambda move: move.step):
        batch = list(group)
        assert step >= len(history), "steps out of order"
        history += [[set(have) for have in history[-1]] for _ in range(step - len(history))]
        before, now = history[-1], [set(have) for have in history[-1]]
        local = [move for move in batch if fabric.is_local(move.src, move.dst)]
        ported = [move for move in batch if not fabric.is_local(move.src, move.dst)]
        assert len({move.src for move in ported}) == len(ported), f"step {step}: sends twice"
        assert len({move.dst for move in ported}) == len(ported), f"step {step}: receives twice"
        assert len({move.dst for move in local}) == len(local), f"step {step}: copies twice"
        assert all(fabric.ports[move.src].out > 0 for move in ported)
        for move in batch:
            assert move.block in before[move.src], f"{move} sends what it lacks"
            assert move.block not in now[move.dst], f"{move} is redundant"
            now[move.dst].add(move.block)
        if trunk_blocks is not None:
            crossing = [ends for move in ported if (ends := fabric.crosses(move.src, move.dst))]
            for side in (0, 1):
                used = Counter(ends[side] for ends in crossing)
                assert max(used.values(), default=0) <= trunk_blocks, f"step {step}: {used}"
        history.append(now)
    assert all(have == every for n, have in enumerate(history[-1]) if n not in schedule.own)
    return history
