"""Several tiers at once: which of them supplies which blocks, and when a disk has read them.

Memory of some nodes, disks of others and the targets' own disks may all hold a model. If each
supplies a share of the blocks in proportion to its rate, they are all busy until the last block has
left, and the targets exchange what they have loaded.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

from shared.ids import NodeId
from shared.messages.pool import NodeInfo

Node = TypeVar("Node", int, NodeId)


def apart(infos: Mapping[NodeId, NodeInfo], nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """The first node of each machine: the nodes of one machine share its disk."""
    first: dict[str, NodeId] = {}
    for node in nodes:
        first.setdefault(machine(infos, node), node)
    return tuple(first.values())


def machine(infos: Mapping[NodeId, NodeInfo], node: NodeId) -> str:
    """The name of the machine that the node runs on; of a node that does not say, its own."""
    host = infos[node].host if node in infos else ""
    return host or f"node {node}"


def shares(
    rates: Mapping[Node, float],
    block_bytes: Sequence[int],
    there: Mapping[Node, AbstractSet[int]],
    busy_s: Mapping[Node, float],
) -> dict[Node, frozenset[int]]:
    """Deals each block to one of the suppliers that have it (`there`), in proportion to their
    rates, so that the last blocks of all suppliers come at about the same time: the largest first,
    each to whoever would be over soonest (Graham's LPT rule). Suppliers take turns: whoever
    receives from several of them always has a block to receive from each. `busy_s` says
    after how many seconds a supplier begins. A supplier that it does not name begins at once."""
    dealt: dict[Node, list[int]] = {node: [] for node in rates}
    over = {node: busy_s.get(node, 0.0) for node in rates}
    blocks = sorted(frozenset[int]().union(*there.values()))
    for block in sorted(blocks, key=lambda block: -block_bytes[block]):
        able = {n: over[n] + block_bytes[block] / rates[n] for n in rates if block in there[n]}
        node = min(able, key=able.__getitem__)
        over[node] = able[node]
        dealt[node].append(block)
    return {node: frozenset(share) for node, share in dealt.items()}


def load_times(
    loading: Mapping[Node, Collection[int]],
    rates: Mapping[Node, float],
    block_bytes: Sequence[int],
) -> dict[tuple[Node, int], float]:
    """(node, block) -> seconds until the node has loaded the block, one after the other, in
    order."""
    times: dict[tuple[Node, int], float] = {}
    for node, blocks in loading.items():
        at = 0.0
        for block in sorted(blocks):
            at += block_bytes[block] / rates[node]
            times[node, block] = at
    return times
