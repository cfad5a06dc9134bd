"""Which replicas prefill and which decode, where a model's operator wants them apart.

The replicas that joined last prefill. So when a replica joins, the oldest one of those that prefill
begins to decode at once, with the requests that it has: no weights and no KV move, and the new
replica prefills in its place (BlitzScale, OSDI 2025, section 5.3). Where replicas go, an instance
that decodes turns to prefill, and its requests move on.

A single replica does both, and so do paths over nodes that still load.
"""

from collections.abc import Sequence

import msgspec

from shared.messages.instances import Instance, InstanceState, Role


def assign_roles(instances: Sequence[Instance], prefill_share: float) -> tuple[Instance, ...]:
    """The instances with their roles. Replicas come in the order in which they joined.
    `prefill_share`: of the replicas that serve, at least one and not all; 0: each does both."""
    serving = [i.id for i in instances if i.is_replica and i.state is InstanceState.SERVING]
    count = 0
    if prefill_share > 0 and len(serving) > 1:
        count = min(max(1, round(prefill_share * len(serving))), len(serving) - 1)
    prefill = set(serving[len(serving) - count :])
    decode = set(serving) - prefill if count else set()
    return tuple(
        _with(
            instance,
            Role.PREFILL
            if instance.id in prefill
            else Role.DECODE
            if instance.id in decode
            else Role.BOTH,
        )
        for instance in instances
    )


def _with(instance: Instance, role: Role) -> Instance:
    return instance if instance.role is role else msgspec.structs.replace(instance, role=role)
