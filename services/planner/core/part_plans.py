"""Plans for devices that receive a part of a model each: one multicast for each part; pure.

What one part's multicast does, the others do beside it, over other devices' ports. A model of which
every device receives all has one part.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from services.planner.core.forecast import NO_FORECAST, Forecast
from services.planner.core.links import Links
from services.planner.core.placement import (
    Held,
    Plan,
    Roles,
    assign_roles,
    plan_transfers,
    repair_transfers,
)
from shared.ids import NodeId
from shared.messages.pool import ModelRecord, Source
from shared.messages.scaling import Timings, Transfer
from shared.parts import Part


def roles_by_part(sources: Iterable[Source], targets: Mapping[NodeId, Part]) -> dict[Part, Roles]:
    """Who sends each part, and who gets it. PlanError if nobody has all of some part."""
    sources, parts = tuple(sources), sorted(set(targets.values()))
    return {
        part: assign_roles(
            [found for source in sources if (found := _within(source, part))],
            [node for node, of in targets.items() if of == part],
        )
        for part in parts
    }


def together(roles: Iterable[Roles]) -> Roles:
    """The roles in the plan as a whole."""
    roles = tuple(roles)
    memory = dict.fromkeys(node for each in roles for node in each.memory)
    disk = dict.fromkeys(node for each in roles for node in each.disk if node not in memory)
    return Roles(
        tuple(memory),
        tuple(disk),
        tuple(node for each in roles for node in each.promoting),
        tuple(node for each in roles for node in each.receiving),
    )


def plan_parts(
    roles: Mapping[Part, Roles],
    held: Held,
    model: ModelRecord,
    links: Links,
    *,
    strategy: str,
    executing: Collection[NodeId],
    max_stages: int,
) -> Plan:
    """See `plan_transfers`, whose other arguments these are."""
    plans = {
        part: plan_transfers(
            each,
            _inside(held, part),
            _piece(model, part),
            links,
            strategy=strategy,
            executing=executing,
            max_stages=max_stages,
        )
        for part, each in roles.items()
    }
    if len(plans) == 1:
        ((part, plan),) = plans.items()
        return _moved(plan, part)
    found = [_moved(plan, part) for part, plan in plans.items()]
    return Plan(
        _by_step(plan.transfers for plan in found),
        _longest(found).strategy,
        tuple(dict.fromkeys(node for plan in found for node in plan.sources)),
        {node: blocks for plan in found for node, blocks in plan.loading.items()},
        max(plan.setup_s for plan in found),
        _forecast(found),
        tuple(dict.fromkeys(words for plan in found for words in plan.ports)),
        _longest(found).considered,
    )


def repair_parts(
    held: Held,
    targets: Mapping[NodeId, Part],
    model: ModelRecord,
    links: Links,
    *,
    reluctant: Collection[NodeId] = (),
) -> tuple[Transfer, ...]:
    """See `repair_transfers`. `targets`: each with the part that it is to hold."""
    return _by_step(
        _shifted(
            repair_transfers(
                _inside(held, part),
                [node for node, of in targets.items() if of == part],
                _piece(model, part),
                links,
                reluctant=reluctant,
            ),
            part,
        )
        for part in sorted(set(targets.values()))
    )


def _within(source: Source, part: Part) -> Source | None:
    """What the source has of the part, as if that were all; None: nothing."""
    blocks = tuple(block for block in source.blocks if block in part.blocks)
    if not blocks:
        return None
    return msgspec.structs.replace(source, blocks=blocks, complete=len(blocks) == part.size)


def _piece(model: ModelRecord, part: Part) -> ModelRecord:
    """The part, as if it were a model."""
    sizes = model.block_bytes[part.start : part.stop]
    return msgspec.structs.replace(model, nbytes=sum(sizes), n_blocks=part.size, block_bytes=sizes)


def _inside(held: Held, part: Part) -> dict[NodeId, frozenset[int]]:
    """What is held of the part, its blocks numbered from 0."""
    return {
        node: frozenset(block - part.start for block in blocks if block in part.blocks)
        for node, blocks in held.items()
    }


def _moved(plan: Plan, part: Part) -> Plan:
    """The plan of a part, in the model's blocks."""
    return replace(
        plan,
        transfers=_shifted(plan.transfers, part),
        loading={
            node: frozenset(block + part.start for block in blocks)
            for node, blocks in plan.loading.items()
        },
    )


def _shifted(transfers: Sequence[Transfer], part: Part) -> tuple[Transfer, ...]:
    if part.start == 0:
        return tuple(transfers)
    return tuple(Transfer(t.step, t.src, t.dst, t.block + part.start) for t in transfers)


def _by_step(transfers: Iterable[Iterable[Transfer]]) -> tuple[Transfer, ...]:
    every = (transfer for each in transfers for transfer in each)
    return tuple(sorted(every, key=lambda transfer: transfer.step))


def _longest(plans: Sequence[Plan]) -> Plan:
    return max(plans, key=lambda plan: plan.forecast.predicted.all_complete_s or 0.0)


def _forecast(plans: Sequence[Plan]) -> Forecast:
    """When all is over: parts that have a source in common come one after the other, as far as is
    known, and others side by side."""
    seconds = [plan.forecast.predicted.all_complete_s for plan in plans]
    if any(at is None for at in seconds):
        return NO_FORECAST
    limits = [plan.forecast.physical_limit_s for plan in plans]
    firsts = [plan.forecast.predicted.first_byte_s for plan in plans]
    known = [at for at in firsts if at is not None]
    over = _shared([(plan, plan.forecast.predicted.all_complete_s) for plan in plans])
    return Forecast(
        Timings(first_byte_s=min(known, default=None), first_complete_s=over, all_complete_s=over),
        None if None in limits else _shared(list(zip(plans, limits, strict=True))),
    )


def _shared(times: Sequence[tuple[Plan, float | None]]) -> float:
    """The longest that any source is busy."""
    busy: dict[NodeId, float] = {}
    for plan, seconds in times:
        for node in plan.sources:
            busy[node] = busy.get(node, 0.0) + (seconds or 0.0)
    return max(busy.values(), default=0.0)
