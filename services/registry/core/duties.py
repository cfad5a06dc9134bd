"""What nodes may be used for: what operators have said of them, and which are about to end.

An operator's word holds for a node's name, whatever processes run under it. That a node is about to
end holds for its generation.
"""

from collections.abc import Iterable

import msgspec

from shared.errors import BadInput
from shared.ids import Generation, NodeId
from shared.messages.copies import Leave
from shared.messages.pool import Duty, NodeInfo, SetDuty

LONGEST_S = 7 * 86400.0
"""The longest limit of a drain."""


class NodeDuty(msgspec.Struct, frozen=True, kw_only=True):
    """As it is stored."""

    node: NodeId
    duty: Duty
    leave_by_ns: int = 0


class Duties:
    def __init__(self) -> None:
        self._said: dict[NodeId, NodeDuty] = {}
        """What operators have said. No entry: the node may be used for all."""
        self._ending: dict[NodeId, tuple[Generation, int]] = {}
        """Generations that are about to end, and by when."""

    def restore(self, duties: Iterable[NodeDuty]) -> None:
        self._said = {duty.node: duty for duty in duties}

    def say(self, request: SetDuty, wall_ns: int) -> None:
        """Takes in an operator's word. BadInput if the limit makes no sense."""
        by_ns = _by_ns(request.within_s, wall_ns)
        if request.within_s and request.duty is not Duty.DRAINING:
            raise BadInput("only a drain has a limit")
        if request.duty is Duty.ALL:
            self._said.pop(request.node, None)
        else:
            node, duty = request.node, request.duty
            self._said[node] = NodeDuty(node=node, duty=duty, leave_by_ns=by_ns)

    def said(self, node: NodeId) -> NodeDuty | None:
        return self._said.get(node)

    def ends(self, leave: Leave, wall_ns: int) -> bool:
        """A node is about to end. Returns whether that is news. BadInput if the limit makes no
        sense."""
        node, generation = leave.node, leave.generation
        by_ns = _by_ns(leave.within_s, wall_ns)
        known = self._ending.get(node)
        if known is not None and known[0] == generation:
            return False
        self._ending[node] = generation, by_ns
        return True

    def ended(self, node: NodeId, generation: Generation) -> None:
        known = self._ending.get(node)
        if known is not None and known[0] == generation:
            del self._ending[node]

    def with_duty(self, info: NodeInfo) -> NodeInfo:
        """The node with its duty, whatever it says of that itself."""
        said = self._said.get(info.node)
        duty = said.duty if said is not None else Duty.ALL
        by_ns = said.leave_by_ns if said is not None else 0
        generation, ends_ns = self._ending.get(info.node, (None, 0))
        if generation == info.generation:
            by_ns = min(filter(None, (by_ns, ends_ns)), default=0)
            if duty is not Duty.DRAINING:
                duty = Duty.ENDING
        if (info.duty, info.leave_by_ns) == (duty, by_ns):
            return info
        return msgspec.structs.replace(info, duty=duty, leave_by_ns=by_ns)


def _by_ns(within_s: float, wall_ns: int) -> int:
    """The time of the wall clock that is `within_s` away; 0 if that is 0."""
    if not 0 <= within_s <= LONGEST_S:
        raise BadInput(f"a limit is between 0 and {LONGEST_S:.0f} s, not {within_s}")
    return wall_ns + int(within_s * 1e9) if within_s else 0
