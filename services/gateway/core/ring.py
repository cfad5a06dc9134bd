"""Consistent hashing: which node is home to a session, on every gateway alike.

Each node has points on a circle, as many as its capacity is worth. A session's home is the node of
the first point behind the session's own, the next nodes behind it stand in (Karger et al. 1997;
with bounded loads: Mirrokni, Thorup and Zadimoghaddam 2018). So a node that comes or goes changes
the home of its own share of the sessions, and of no others. Rendezvous hashing does the same, but
each look-up of it costs a hash for every node.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from math import ceil

from shared.ids import NodeId

POINTS = 32
"""For each unit of capacity. They are cut from digests of 8 points."""
_IN_DIGEST = 8
_BYTES = 8


class Ring:
    def __init__(self, points: Mapping[NodeId, int]) -> None:
        """`points`: how many points each node has (`points_of`)."""
        found = sorted(
            (point, node) for node, count in points.items() for point in _points(node, count)
        )
        self._points = [point for point, _ in found]
        self._nodes = [node for _, node in found]

    def homes(self, session: str) -> Iterator[NodeId]:
        """The session's home, and then those that stand in for it, each once."""
        start = bisect(self._points, _number(blake2b(session.encode()).digest()))
        seen: set[NodeId] = set()
        for index in range(start - len(self._nodes), start):
            node = self._nodes[index]
            if node not in seen:
                seen.add(node)
                yield node


def points_of(capacity: float) -> int:
    return max(1, round(POINTS * capacity))


def _points(node: NodeId, count: int) -> Iterator[int]:
    digests = [blake2b(f"{node} {i}".encode()).digest() for i in range(ceil(count / _IN_DIGEST))]
    data = b"".join(digests)
    return (_number(data[_BYTES * i :]) for i in range(count))


def _number(data: bytes) -> int:
    return int.from_bytes(data[:_BYTES], "big")
