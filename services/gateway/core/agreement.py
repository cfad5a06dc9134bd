"""Whether replicas of a model answer alike, and which of them is wrong.

Every replica is asked for the log probabilities of the same few tokens. Two that answer alike are
right: it is most improbable that two are wrong in the same way. From then on everybody is compared
with them. A replica that answers otherwise is asked again before it counts as wrong.
"""

import enum

from shared.ids import NodeId
from shared.known_tokens import Answer, alike

TRIES = 2
"""So many times in a row a replica has to answer otherwise."""


class Verdict(enum.Enum):
    OPEN = "open"
    """Nobody knows yet what is right."""
    ALIKE = "alike"
    OTHER = "other"
    """It answers otherwise, and is to be asked again."""
    WRONG = "wrong"


class Agreement:
    def __init__(self) -> None:
        self.known: Answer | None = None
        """What is right. None: not known yet."""
        self.doubts: dict[NodeId, int] = {}
        """How many times in a row each node answered otherwise."""
        self._said: dict[NodeId, Answer] = {}
        """What each said last, while it is not known what is right."""

    def hear(self, node: NodeId, answer: Answer) -> Verdict:
        if self.known is None and not self._agree(node, answer):
            return Verdict.OPEN
        assert self.known is not None
        if alike(self.known, answer):
            self.doubts.pop(node, None)
            return Verdict.ALIKE
        self.doubts[node] = self.doubts.get(node, 0) + 1
        return Verdict.WRONG if self.doubts[node] >= TRIES else Verdict.OTHER

    def forget(self, node: NodeId) -> None:
        self.doubts.pop(node, None)

    def _agree(self, node: NodeId, answer: Answer) -> bool:
        """Looks for another node that answered alike. Those that did not are asked again."""
        self._said[node] = answer
        if not any(alike(said, answer) for other, said in self._said.items() if other != node):
            return False
        self.known = answer
        self.doubts = {other: 1 for other, said in self._said.items() if not alike(said, answer)}
        self._said = {}
        return True
