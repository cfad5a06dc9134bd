"""The strategies that the binomial pipeline is compared with: chains, binary trees, a library's
broadcast."""

from collections.abc import Sequence

from services.planner.core.multicast.fabric import Fabric, Task
from services.planner.core.multicast.groups import Group
from services.planner.core.multicast.schedule import Move, by_step


def chain_moves(task: Task, sources: Sequence[int], relays: Sequence[int]) -> list[Move]:
    """One chain for each source, with blocks in order, for unequal links. BlitzScale, section 5.1,
    Algorithm 1.

    In a chain whose edges take tau_1, tau_2, .. for a block, the i-th node is complete after tau_1
    + .. + tau_i + (b - 1) max(tau_1..tau_i). So the order from the fastest to the slowest is best
    for each of them. (Where blocks follow each other without alpha it is (b - 1) alpha less,
    equally for all.) The fastest node left joins the chain on which it would be complete first. An
    edge runs at the least of what its sender gets, what its sender sends, and what its receiver
    takes. The paper's line 10 forgets what the sender itself receives; and its rule (the chain of
    the highest rate, whatever its length) leaves sources idle. On equal links the chains are
    balanced: b + ceil(D/k) - 1 steps.
    """
    chains = [_Chain(task, source) for source in sources]
    for node in _fastest_first(task.fabric, sources, relays):
        _, _, best = min(
            (chain.finish(node), task.fabric.crosses(chain.nodes[-1], node) is not None, i)
            for i, chain in enumerate(chains)
        )
        chains[best].append(node)
    return by_step(move for chain in chains for move in line_moves(chain.nodes, task.blocks))


def line_moves(nodes: Sequence[int], blocks: int) -> list[Move]:
    """nodes[0] sends the blocks in order to nodes[1], and so on down the line."""
    return [
        Move(block + hop + 1, nodes[hop], nodes[hop + 1], block)
        for hop in range(len(nodes) - 1)
        for block in range(blocks)
    ]


def _fastest_first(fabric: Fabric, sources: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """The nodes, fastest first. Equally fast nodes of one rack stand together, so that the chain
    seldom crosses trunks."""
    racks = list(dict.fromkeys(fabric.ports[node].rack for node in (*sources, *nodes)))

    def key(node: int) -> tuple[float, int]:
        port = fabric.ports[node]
        return -min(port.out, port.into), racks.index(port.rack)

    return sorted(nodes, key=key)


class _Chain:
    def __init__(self, task: Task, source: int) -> None:
        self.task = task
        self.nodes = [source]
        self.fill_s = 0.0
        """tau_1 + .. + tau_i"""
        self.slowest_s = 0.0

    def finish(self, node: int) -> float:
        """Seconds after which `node` would be complete as the chain's next node."""
        tau = self._block_s(node)
        return self.fill_s + tau + (self.task.blocks - 1) * max(self.slowest_s, tau)

    def append(self, node: int) -> None:
        tau = self._block_s(node)
        self.fill_s += tau
        self.slowest_s = max(self.slowest_s, tau)
        self.nodes.append(node)

    def _block_s(self, node: int) -> float:
        mean = sum(self.task.block_bytes) / self.task.blocks
        return self.task.fabric.overhead_s + mean / self.task.fabric.rate(self.nodes[-1], node)


def broadcast_moves(task: Task, sources: Sequence[int], relays: Sequence[int]) -> list[Move]:
    """One ring through the nodes, rack by rack, from the best source: NCCL's broadcast as the
    papers used it. It takes b + D - 1 steps after the group is formed, and makes no use of other
    sources."""
    if not relays:
        return []
    racks = [task.fabric.ports[sources[0]].rack]
    racks += [task.fabric.ports[node].rack for node in relays]
    ring = sorted(relays, key=lambda node: racks.index(task.fabric.ports[node].rack))
    return by_step(line_moves((sources[0], *ring), task.blocks))


def tree_moves(groups: Sequence[Group], blocks: int) -> list[Move]:
    """One binary tree for each source, in which a node sends each block to two children in turn.
    FaaSNet, section 3.

    An inner node's port carries every block twice, so loading takes about twice as long.
    """
    return by_step(
        move for group in groups for move in _tree((group.source, *group.destinations), blocks)
    )


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
