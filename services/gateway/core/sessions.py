"""On which node a session's last request ran, as far as this gateway has sent requests there.

A session's home (`ring`) changes when replicas come or go, or when their measured speeds change.
Its KV does not move with it.
"""

from shared.ids import NodeId

KNOWN = 1 << 16
"""Sessions of a model that are remembered, those that were used last."""


class Sessions:
    def __init__(self, known: int = KNOWN) -> None:
        self._known = known
        self._nodes: dict[str, NodeId] = {}
        """In the order of their last use."""

    def learn(self, session: str, node: NodeId) -> None:
        self._nodes.pop(session, None)
        self._nodes[session] = node
        if len(self._nodes) > self._known:
            del self._nodes[next(iter(self._nodes))]

    def last(self, session: str) -> NodeId | None:
        return self._nodes.get(session)
