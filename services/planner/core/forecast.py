"""What a plan is expected to take, in the terms of the event's record."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.planner.core.costs import arrival_times, physical_limit, predict
from services.planner.core.multicast.schedule import Move
from services.planner.core.placement import Held
from shared.ids import NodeId
from shared.messages.scaling import Timings, Transfer


@dataclass(frozen=True, slots=True)
class Forecast:
    predicted: Timings
    physical_limit_s: float | None
    """Of a multicast to nodes that hold nothing; None for any other."""


def forecast(
    transfers: Iterable[Transfer],
    held: Held,
    executing: Collection[NodeId],
    links: Mapping[NodeId, int],
    block_bytes: Sequence[int],
    *,
    overhead_s: float,
    max_stages: int,
) -> Forecast:
    """Timings of the transfers; none where some link's rate (bytes/s) is not known.

    `held`: what every sender and receiver holds at the start; `executing`: those of them that run
    what they hold (a source in host memory does not).
    """
    nodes = tuple(held)
    index = {node: i for i, node in enumerate(nodes)}
    moves = [Move(t.step, index[t.src], index[t.dst], t.block) for t in transfers]
    rates = [links.get(node, 0) for node in nodes]
    if not moves or not all(rates):
        return Forecast(Timings(), None)
    arrivals = arrival_times(moves, block_bytes, rates, overhead_s)
    blocks = len(block_bytes)
    outlook = predict(
        [held[node] for node in nodes],
        blocks,
        arrivals,
        max_stages=max_stages,
        executing=[index[node] for node in executing if node in index],
    )
    complete = sum(len(held[node]) == blocks for node in nodes)
    empty = sum(not held[node] for node in nodes)
    limit = None
    if complete + empty == len(nodes):
        limit = physical_limit(sum(block_bytes), blocks, len(nodes), min(rates), complete)
    return Forecast(
        Timings(
            first_byte_s=overhead_s,
            first_path_s=outlook.first_path_s,
            first_complete_s=outlook.first_complete_s,
            all_complete_s=outlook.all_complete_s,
        ),
        limit,
    )
