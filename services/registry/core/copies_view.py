"""Where every model has its copies, in words and numbers for people; a plain function."""

from collections.abc import Iterable

from services.registry.core.goals import machine_of
from services.registry.core.kept import KeptCopies
from services.registry.core.pool import Pool
from shared.ids import ModelId
from shared.messages.copies import Durable, ModelCopies, NodeTiers, PoolCopies, UnderWay
from shared.messages.pool import ModelRecord, NodeInfo, Tier


def copies_view(pool: Pool) -> PoolCopies:
    under_way: dict[ModelId, list[UnderWay]] = {}
    for info, progress in pool.durable.copying():
        if progress.running:
            found = UnderWay(info.node, machine_of(info), progress)
            under_way.setdefault(progress.model_id, []).append(found)
    models = tuple(
        _model(pool, record, under_way.get(record.model_id, ())) for record in pool.catalog.records
    )
    machines = {machine_of(info) for info in pool.leases.present}
    return PoolCopies(
        models=models,
        nodes=tuple(_node(pool, info) for info in pool.leases.present),
        memory_bytes=sum(model.nbytes * len(model.host) for model in models),
        per_host_bytes=sum(model.nbytes for model in models) * len(machines),
    )


def _model(pool: Pool, record: ModelRecord, under_way: Iterable[UnderWay]) -> ModelCopies:
    durable = sorted(
        (Durable(info.node, machine_of(info)) for info in pool.durable.there(record)),
        key=lambda copy: copy.node,
    )
    device = tuple(
        info.node
        for info in pool.leases.present
        if len(pool.holdings.blocks(info, record.model_id).get(Tier.GPU, ())) == record.n_blocks
    )
    copies = pool.copies(record.model_id)
    memory = copies.memory
    wanted = pool.durable.wanted(record)
    machines = len({copy.machine for copy in durable})
    lacking = "" if machines >= wanted else f"{machines} of {wanted} durable copies: "
    shortfall = lacking and lacking + _why(pool, record, under_way)
    return ModelCopies(
        name=record.name,
        model_id=record.model_id,
        nbytes=record.nbytes,
        device=device,
        host=tuple(node for node in memory if node not in device),
        together=copies.together,
        durable=tuple(durable),
        under_way=tuple(under_way),
        wanted=wanted,
        shortfall="; ".join(filter(None, (shortfall, _in_memory(pool, record)))),
    )


def _in_memory(pool: Pool, record: ModelRecord) -> str:
    """What is missing in memory, where nodes have host caches."""
    wanted = pool.host.wanted(record)
    machines = len({machine_of(info) for info in pool.host.there(record)})
    machines += pool.host.in_parts(record)
    if machines >= wanted:
        return ""
    return f"{machines} of {wanted} copies in memory: {_next(pool, pool.host, record)}"


def _why(pool: Pool, record: ModelRecord, under_way: Iterable[UnderWay]) -> str:
    durable = pool.durable
    coming = [
        f"the next is at {copy.progress.done / max(copy.progress.nbytes, 1):.0%} on {copy.node}"
        for copy in under_way
    ]
    if reason := durable.reasons.get(record.model_id):
        return ", ".join([*coming, reason])
    awaited = durable.awaited(record.model_id)
    waits = [f"{node} is waited for, which is gone" for node in awaited]
    return ", ".join([*coming, *waits]) or _next(pool, durable, record)


def _next(pool: Pool, kept: KeptCopies, record: ModelRecord) -> str:
    """What comes of the next copy, also if the registry has not looked for a place yet."""
    reason = kept.reasons.get(record.model_id) or kept.hindrance(record, pool.givers(record))
    return reason or "the next is about to be made"


def _node(pool: Pool, info: NodeInfo) -> NodeTiers:
    status = pool.holdings.of(info)
    return NodeTiers(
        node=info.node,
        machine=machine_of(info),
        rack=info.rack,
        arena_bytes=info.arena_bytes,
        arena_free=status.arena_free if status else 0,
        host_bytes=info.host_bytes,
        host_free=status.host_free if status else 0,
        disk_bytes=status.disk_bytes if status else 0,
        disk_free=status.disk_free if status else 0,
    )
