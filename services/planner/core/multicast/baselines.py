"""What the binomial pipeline is compared with: chains (BlitzScale) and binary trees (FaaSNet)."""

from collections.abc import Sequence

from services.planner.core.multicast.groups import make_groups
from services.planner.core.multicast.schedule import Move, Schedule


def chain(nodes: int, blocks: int, sources: Sequence[int]) -> Schedule:
    """One chain a source, blocks in order: b + N/k - 2 steps. BlitzScale, section 5.1."""
    moves = [
        Move(block + hop + 1, src, dst, block)
        for group in make_groups(nodes, blocks, sources)
        for hop, (src, dst) in enumerate(
            zip((group.source, *group.destinations), group.destinations, strict=False)
        )
        for block in range(blocks)
    ]
    return Schedule(nodes, blocks, tuple(sources), tuple(sorted(moves)))


def binary_tree(nodes: int, blocks: int, sources: Sequence[int]) -> Schedule:
    """One tree a source; a node sends each block to two children in turn. FaaSNet, section 3.

    An inner node's port carries every block twice, so loading takes about twice as long.
    """
    moves: list[Move] = []
    for group in make_groups(nodes, blocks, sources):
        moves += _tree((group.source, *group.destinations), blocks)
    return Schedule(nodes, blocks, tuple(sources), tuple(sorted(moves)))


def _tree(nodes: Sequence[int], blocks: int) -> list[Move]:
    """Heap order: node i's children are 2i+1 and 2i+2."""
    arrived = [[0] * blocks for _ in nodes]
    moves: list[Move] = []
    for parent in range(len(nodes) // 2):
        step = 0
        for block in range(blocks):
            for child in range(2 * parent + 1, min(2 * parent + 3, len(nodes))):
                step = max(step, arrived[parent][block]) + 1
                arrived[child][block] = step
                moves.append(Move(step, nodes[parent], nodes[child], block))
    return moves
