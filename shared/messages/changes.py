"""Messages that carry only changes: how a receiver keeps the full state by them.

Each message names the version that it builds on, and holds everything that has changed since that
version. A receiver that knows that version or a later one can apply it. So a lost, repeated or late
message costs nothing, as long as a later message builds on a version that the receiver knows.
Otherwise there is a gap, and the receiver asks for the full state.
"""

from collections.abc import Set as AbstractSet

import msgspec

from shared.ids import ModelId
from shared.messages.pool import NodeStatus


def whole_status(known: NodeStatus | None, said: NodeStatus) -> NodeStatus | None:
    """The status with all that the node holds. `known`: the last one, whole, of whatever
    generation. None: there is a gap."""
    if said.since == 0:
        return said
    if known is None or known.generation != said.generation or known.seq < said.since:
        return None
    holdings = known.holdings
    if named := named_by(said):
        holdings = (*(h for h in holdings if h.model_id not in named), *said.holdings)
    return msgspec.structs.replace(said, since=0, holdings=holdings, dropped=())


def named_by(said: NodeStatus) -> AbstractSet[ModelId]:
    """The models of which it says what is held now. Of all others, one with `since` says that
    nothing has changed, one without that nothing is held."""
    return {holding.model_id for holding in said.holdings}.union(said.dropped)
