"""Messages that carry only changes: how a receiver keeps the full state by them.

Each message names the version that it builds on, and holds everything that has changed since that
version. A receiver that knows that version or a later one can apply it. So a lost, repeated or late
message costs nothing, as long as a later message builds on a version that the receiver knows.
Otherwise there is a gap, and the receiver asks for the full state.
"""

from collections.abc import Set as AbstractSet

import msgspec

from shared.ids import ModelId
from shared.messages.instances import InstanceChange, InstanceSet
from shared.messages.pool import NodeStatus


def whole_status(known: NodeStatus | None, said: NodeStatus) -> NodeStatus | None:
    """The status with all that the node holds. `known`: the last one, whole, of whatever
    generation. None: there is a gap."""
    if not applies(known, said):
        return None
    if said.since == 0 or known is None:
        return said
    holdings = known.holdings
    if named := named_by(said):
        holdings = (*[h for h in holdings if h.model_id not in named], *said.holdings)
    return msgspec.structs.replace(said, since=0, holdings=holdings, dropped=())


def applies(known: NodeStatus | None, said: NodeStatus) -> bool:
    """Whether the status can be taken in: it is whole, or it says what has changed since one that
    is known."""
    if said.since == 0:
        return True
    return known is not None and known.generation == said.generation and known.seq >= said.since


def named_by(said: NodeStatus) -> AbstractSet[ModelId]:
    """The models of which it says what is held now. Of all others, one with `since` says that
    nothing has changed, one without that nothing is held."""
    return {holding.model_id for holding in said.holdings}.union(said.dropped)


def change_of(known: InstanceSet, now: InstanceSet) -> InstanceChange:
    """What has changed from one set of a planner to the next."""
    before = {instance.id: instance for instance in known.instances}
    changed = tuple(i for i in now.instances if before.pop(i.id, None) != i)
    return InstanceChange(
        now=msgspec.structs.replace(now, instances=changed),
        since=known.revision,
        gone=tuple(before),
        trace=now.trace,
        cause=now.cause,
    )


def whole_set(known: InstanceSet | None, said: InstanceChange) -> InstanceSet | None:
    """The set after a change. `known`: the newest set that is known; it stays if the change is
    late. None: there is a gap."""
    now = said.now
    if known is None or known.epoch < now.epoch:
        return None
    if (now.epoch, now.revision) < (known.epoch, known.revision):
        return known
    if known.revision < said.since:
        return None
    if not (now.instances or said.gone):
        return msgspec.structs.replace(now, instances=known.instances)
    instances = {instance.id: instance for instance in known.instances}
    instances.update((instance.id, instance) for instance in now.instances)
    for gone in said.gone:
        instances.pop(gone, None)
    return msgspec.structs.replace(now, instances=tuple(instances.values()))


def heard_set(known: InstanceSet | None, said: InstanceSet | InstanceChange) -> InstanceSet | None:
    """The set after either message, for an observer, who waits for a whole set after a gap."""
    return said if isinstance(said, InstanceSet) else whole_set(known, said)
