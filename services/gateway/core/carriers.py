"""On which nodes an adapter ran last, as far as this gateway has sent requests there.

A node has it in memory then, unless it had to make room since. Then the node loads it again.
"""

from collections.abc import Collection

from shared.ids import ModelId, NodeId

KNOWN = 1 << 14
"""Adapters that are remembered, those that were used last."""
CARRIERS = 4
"""Nodes that are remembered for an adapter, the last ones."""


class Carriers:
    def __init__(self, known: int = KNOWN) -> None:
        self._known = known
        self._nodes: dict[ModelId, dict[NodeId, None]] = {}
        """Both in the order of their last use."""

    def learn(self, adapter: ModelId, node: NodeId) -> None:
        nodes = self._nodes.pop(adapter, {})
        nodes.pop(node, None)
        nodes[node] = None
        if len(nodes) > CARRIERS:
            del nodes[next(iter(nodes))]
        self._nodes[adapter] = nodes
        if len(self._nodes) > self._known:
            del self._nodes[next(iter(self._nodes))]

    def of(self, adapter: ModelId) -> Collection[NodeId]:
        return self._nodes.get(adapter, {})
