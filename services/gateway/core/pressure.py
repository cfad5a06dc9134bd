"""How much is going on at a gateway, in a few numbers, for those who choose among gateways."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.gateway.core.requests import Request, State
from shared.ids import ModelId, NodeId


@dataclass(frozen=True, slots=True)
class Pressure:
    waiting: int
    """Requests that wait for an instance."""
    running: int
    kv_used: float
    """The mean share of the KV caches in use, of the nodes that lead requests of this gateway."""
    waiting_adapters: frozenset[ModelId]
    running_adapters: frozenset[ModelId]


def pressure(
    requests: Iterable[Request], leaders: Iterable[NodeId], kv_used: Mapping[NodeId, float]
) -> Pressure:
    """`leaders`: the nodes that lead the requests, in any number. `kv_used`: what each node said
    last."""
    running: list[Request] = []
    waiting: list[Request] = []
    for request in requests:
        (waiting if request.state is State.QUEUED else running).append(request)
    shares = [kv_used.get(node, 0.0) for node in set(leaders)]
    return Pressure(
        waiting=len(waiting),
        running=len(running),
        kv_used=sum(shares) / len(shares) if shares else 0.0,
        waiting_adapters=_adapters(waiting),
        running_adapters=_adapters(running),
    )


def _adapters(requests: Iterable[Request]) -> frozenset[ModelId]:
    return frozenset(request.adapter for request in requests if request.adapter)
