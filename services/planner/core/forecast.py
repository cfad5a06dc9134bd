"""What a plan is expected to take, in the terms of the event's record."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.planner.core.costs import arrival_times, physical_limit, predict
from services.planner.core.multicast.schedule import Move
from services.planner.core.placement import Roles
from shared.ids import NodeId
from shared.messages.scaling import Timings, Transfer


@dataclass(frozen=True, slots=True)
class Forecast:
    predicted: Timings
    physical_limit_s: float | None


def forecast(
    transfers: Iterable[Transfer],
    roles: Roles,
    links: Mapping[NodeId, int],
    block_bytes: Sequence[int],
    *,
    overhead_s: float,
    max_stages: int,
) -> Forecast:
    """Timings of the multicast; none where some link's rate (bytes/s) is not known.

    Sources that promote from disk are taken to hold their blocks: the disk is not modelled.
    """
    nodes = (*roles.sources, *roles.receiving)
    rates = [links.get(node, 0) for node in nodes]
    if not roles.receiving or not all(rates):
        return Forecast(Timings(), None)
    index = {node: i for i, node in enumerate(nodes)}
    moves = [Move(t.step, index[t.src], index[t.dst], t.block) for t in transfers]
    arrivals = arrival_times(moves, block_bytes, rates, overhead_s)
    blocks = len(block_bytes)
    every = frozenset(range(blocks))
    held = [every if node in roles.sources else frozenset[int]() for node in nodes]
    outlook = predict(held, blocks, arrivals, max_stages=max_stages)
    return Forecast(
        Timings(
            first_byte_s=overhead_s,
            first_path_s=outlook.first_path_s,
            first_complete_s=outlook.first_complete_s,
            all_complete_s=outlook.all_complete_s,
        ),
        physical_limit(sum(block_bytes), blocks, len(nodes), min(rates), len(roles.sources)),
    )
