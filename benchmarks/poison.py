"""How long streams stall when a request kills the node that they run on, and then the next one.

Run: `.venv/bin/python -m benchmarks.poison --seeds 40`. The real services in virtual time play the
scenarios of seeds that have a request which kills whatever runs it, without any other fault. All
that ran on a dead node are suspects then, and are tried one by one (`gateway/core/suspects.py`).
A stall is the time between the last token before the death and the next one, of each harmless
stream that ran over that node. The bar is that of any death of a node.

The limit beside it is what the same scenarios give if every gateway knew at once which request it
was, so that nobody is a suspect. What stays are the streams for which the nodes that are left have
no slot, or that wait until a model is loaded again because its only copy died.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise
from statistics import median, quantiles

from services.gateway.core.commands import Piece
from shared.clock import now
from shared.ids import NodeId, RequestId
from simulation import chaos
from simulation.clients import Replay
from simulation.cluster import Cluster
from simulation.scenario import Scenario, scenario

BAR_S = 1.5


@dataclass(slots=True)
class Seen:
    """What happened in one scenario."""

    came: dict[RequestId, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When each token of each request came."""
    struck: list[tuple[float, list[RequestId]]] = field(default_factory=list)
    """When each node died, and the requests that ran there beside the one that killed it."""

    def stalls(self) -> Iterator[float]:
        for at, requests in self.struck:
            for request in requests:
                pairs = pairwise(self.came[request])
                yield from (after - before for before, after in pairs if before <= at < after)


class _Watched(Replay):
    seen: Seen

    def on_piece(self, piece: Piece) -> None:
        before = self.tokens
        super().on_piece(piece)
        if self.tokens > before:
            self.seen.came[self.id].append(now())


class _Play(chaos.Play):
    seen: Seen

    def _kill(self, name: str, request: RequestId) -> None:
        if name in self._cluster.nodes:
            others = [each for each in _running_over(self._cluster, name) if each != request]
            self.seen.struck.append((now(), others))
        super()._kill(name, request)


class _Oracle(_Play):
    """All gateways know at once which request it was. It ends."""

    def _kill(self, name: str, request: RequestId) -> None:
        super()._kill(name, request)
        for gateway in self._cluster.gateways.values():
            for model in gateway.frontend.dispatch._models.values():
                model._suspects._explained[NodeId(name)] = now()
        for asked in list(self._open.values()):
            if asked.replay is not None and asked.replay.id == request and asked.frontend:
                asked.replay.leave(asked.frontend)


def _running_over(cluster: Cluster, node: str) -> list[RequestId]:
    return [
        request.id
        for gateway in cluster.gateways.values()
        for model in gateway.frontend.dispatch._models.values()
        for route in model.table.routes.values()
        if node in route.nodes
        for request in route.runs()
    ]


def poisoned() -> Iterator[Scenario]:
    """The scenarios with such a request, without their faults, in the order of their seeds."""
    for seed in count():
        found = scenario(seed)
        if any(arrival.kills_at is not None for arrival in found.requests):
            yield replace(found, faults=())


@dataclass(slots=True)
class _Tally:
    stalls: list[float] = field(default_factory=list)
    died: int = 0
    bad: int = 0

    def play(self, played: Scenario, kind: type[_Play]) -> None:
        seen = Seen()
        kind.seen = _Watched.seen = seen
        verdict = chaos.play(played, kind, _Watched)
        self.stalls += seen.stalls()
        self.died += len(seen.struck)
        self.bad += bool(verdict.violations)

    @property
    def p99(self) -> float:
        return quantiles(self.stalls, n=100, method="inclusive")[98]

    def __str__(self) -> str:
        stalls = self.stalls
        return (
            f"{len(stalls)} streams stalled for {median(stalls):.2f} s (median), "
            f"{self.p99:.2f} s (p99), {max(stalls):.2f} s (most), "
            f"{sum(stall > BAR_S for stall in stalls)} of them for more than {BAR_S:g} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.poison", description=__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="how many scenarios (40)")
    scenarios = parser.parse_args().seeds
    found, limit = _Tally(), _Tally()
    for played in islice(poisoned(), scenarios):
        found.play(played, _Play)
        limit.play(played, _Oracle)
    met = found.p99 <= BAR_S
    print(f"{scenarios} scenarios, {found.died} nodes killed, {found.bad} with violations")
    print(f"{found} (bar for the p99 {BAR_S:g} s: {'met' if met else 'NOT MET'})")
    print(f"the limit, if it were known at once who did it ({limit.died} nodes killed): {limit}")
    return 0 if met and not found.bad else 1


if __name__ == "__main__":
    raise SystemExit(main())
