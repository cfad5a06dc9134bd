"""On which nodes the KV of a prompt's beginning lies, as far as this gateway has sent it there.

Prompts are cut into parts of 64 tokens. A part's *mark* is a hash of all tokens up to its end, so
two prompts that begin alike have their first marks in common. A node computes the KV of all that it
is sent, so it has the KV of a prompt once it gave the first token, and of the answer at its end.
When its memory is needed for others it forgets, which this index cannot see: then the request
computes its prompt there as it would anywhere, and the index is right again.
"""

from collections.abc import Iterator, Sequence

from shared.ids import NodeId

PART = 64
KNOWN = 1 << 17
"""Parts of a model that are remembered, those that were used last. About 40 MB."""
HOLDERS = 8
"""Nodes that are remembered for a part, the last ones."""
Marks = tuple[int, ...]


def marks_of(tokens: Sequence[int], before: Marks = (), adapter: str = "") -> Marks:
    """The marks of all whole parts. `before`: those of the first parts, if they are known.
    `adapter`: what KV is computed with."""
    marks, mark = list(before), before[-1] if before else hash(adapter)
    for start in range(PART * len(before), len(tokens) - PART + 1, PART):
        mark = hash((mark, tuple(tokens[start : start + PART])))
        marks.append(mark)
    return tuple(marks)


class Prefixes:
    def __init__(self, known: int = KNOWN) -> None:
        self._known = known
        self._nodes: dict[int, dict[NodeId, None]] = {}
        """The nodes of each mark. Both in the order of their last use."""

    def learn(self, marks: Marks, node: NodeId) -> None:
        """The KV of all these parts lies on the node."""
        # The beginning comes last, so that it is forgotten after what follows it.
        for mark in reversed(marks):
            nodes = self._nodes.pop(mark, None) or {}
            nodes.pop(node, None)
            nodes[node] = None
            if len(nodes) > HOLDERS:
                del nodes[next(iter(nodes))]
            self._nodes[mark] = nodes
        while len(self._nodes) > self._known:
            del self._nodes[next(iter(self._nodes))]

    def find(self, marks: Marks) -> Iterator[tuple[int, list[NodeId]]]:
        """(tokens, nodes): how many tokens of the beginning lie on these nodes, the most first.
        Each node once."""
        seen: set[NodeId] = set()
        for count in range(len(marks), 0, -1):
            if found := [n for n in self._nodes.get(marks[count - 1], ()) if n not in seen]:
                seen.update(found)
                yield PART * count, found
