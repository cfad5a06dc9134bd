"""What a node says of blocks that have come to it, block by block or of several at once."""

from collections.abc import Sequence

import msgspec

from shared.ids import EventId, Generation, ModelId, NodeId
from shared.messages.scaling import BlockArrived, BlocksArrived, Landing


class Arrivals(msgspec.Struct, frozen=True, gc=False):
    """One report of one node."""

    event: EventId
    node: NodeId
    generation: Generation
    model: ModelId
    blocks: Sequence[Landing]
    """At least one."""
    since_s: Sequence[float]
    """For how long the node has had each."""


News = Sequence[tuple[Arrivals, frozenset[int]]]
"""Reports of one event, at least one, in their order. Each comes with those of its blocks that no
report has named before."""


def arrivals_of(message: BlockArrived | BlocksArrived) -> Arrivals:
    event, node, model = message.event, message.node, message.model_id
    if isinstance(message, BlockArrived):
        return Arrivals(event, node, message.generation, model, (message,), (0.0,))
    # Both times are the node's.
    since_s = [max(0.0, (message.sent_ns - each.ready_ns) / 1e9) for each in message.blocks]
    return Arrivals(event, node, message.generation, model, message.blocks, since_s)
