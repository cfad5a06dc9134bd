"""Gateways and instances in simulated time. The gateways are the real dispatch cores, with their
load reports to each other; an instance serves one request after the other, as fast as its
capacity."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from benchmarks.routing.policies import Policy
from services.gateway.core.commands import Command, Send
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.reporting import Reporting
from services.gateway.core.requests import Request
from services.gateway.core.routing import Routing
from shared.ids import GatewayId, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.serving import Sampling, Token, Tokens

REPORT_S, WHOLE_S = 0.1, 0.5
MODEL, NAME = ModelId("m"), ModelName("m")
TOKENS = 100
"""What a gateway knows of each request's work: its `max_tokens`. Most end earlier."""


@dataclass(slots=True)
class Server:
    instance: Instance
    waiting: deque[tuple[RequestId, int]] = field(default_factory=deque)
    """(request, gateway); the first one is served."""


@dataclass(slots=True)
class Measured:
    waits_s: list[float] = field(default_factory=list)
    longest: int = 0
    """The most requests that any instance had at once."""
    longest_sum: int = 0
    looks: int = 0

    @property
    def usual_longest(self) -> float:
        """The mean, over time, of the longest queue."""
        return self.longest_sum / max(1, self.looks)

    def wait(self, quantile: float) -> float:
        return sorted(self.waits_s)[int(quantile * len(self.waits_s))]


class World:
    def __init__(
        self,
        capacities: Sequence[float],
        gateways: int,
        policy: Policy,
        work: Callable[[random.Random], float],
        load: float,
        seed: int,
    ) -> None:
        """`work`: draws the seconds of a request on an instance of capacity 1, of mean 1."""
        self._rng = random.Random(seed)
        self._work = work
        self._per_s = load * sum(capacities)
        self._servers = {
            each.id: Server(each)
            for each in (_replica(i, c, policy.slots) for i, c in enumerate(capacities))
        }
        self._gateways = [
            self._gateway(number, policy.routing(self._length)) for number in range(gateways)
        ]
        self._reporting = [Reporting(WHOLE_S) for _ in range(gateways)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._arrived: dict[RequestId, float] = {}
        self._needs: dict[RequestId, float] = {}
        self._from = inf
        self.found = Measured()

    def _gateway(self, number: int, routing: Routing) -> Dispatch:
        draw = random.Random(self._rng.random()).random
        dispatch = Dispatch(Rules(draw, 1 << 30, inf, inf, 8, routing=routing))
        dispatch.take_id(GatewayId(f"g{number}"), 0.0)
        dispatch.add_model(NAME, MODEL)
        instances = tuple(server.instance for server in self._servers.values())
        new = InstanceSet(name=NAME, model_id=MODEL, epoch=1, revision=1, instances=instances)
        dispatch.on_instances(new, 0.0)
        return dispatch

    def _length(self, instance: InstanceId) -> int:
        return len(self._servers[instance].waiting)

    def run(self, warm_s: float, measure_s: float) -> Measured:
        """What requests that came in the last `measure_s` seconds waited."""
        self._from = warm_s
        self._at(0.0, self._arrive)
        self._at(0.0, self._look)
        for number in range(len(self._gateways)):
            self._at(REPORT_S * self._rng.random(), self._report_of(number))
        now = 0.0
        while now < warm_s + measure_s:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return self.found

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), happen))

    def _arrive(self, now: float) -> None:
        self._at(now + self._rng.expovariate(self._per_s), self._arrive)
        name = RequestId(f"r{next(self._order)}")
        request = Request(name, MODEL, (1,), TOKENS, (), Sampling(), now)
        number = self._rng.randrange(len(self._gateways))
        self._arrived[name], self._needs[name] = now, self._work(self._rng)
        self._do(number, self._gateways[number].admit([request], now), now)

    def _do(self, number: int, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Send):
                server = self._servers[command.submit.instance]
                server.waiting.append((command.submit.request, number))
                if len(server.waiting) == 1:
                    self._serve(server, now)
                if now >= self._from:
                    self.found.longest = max(self.found.longest, len(server.waiting))

    def _serve(self, server: Server, now: float) -> None:
        """Begins with the first request that waits there."""
        request, number = server.waiting[0]
        arrived = self._arrived.pop(request)
        if arrived >= self._from:
            self.found.waits_s.append(now - arrived)
        needs = self._needs.pop(request) / server.instance.capacity

        def end(now: float) -> None:
            server.waiting.popleft()
            token = Token(request, 1, 0, 1, "stop")
            message = Tokens(node=server.instance.leader, tokens=(token,))
            commands = self._gateways[number].on_tokens(message, now)
            if server.waiting:
                self._serve(server, now)
            self._do(number, commands, now)

        self._at(now + needs, end)

    def _look(self, now: float) -> None:
        self._at(now + 1.0, self._look)
        if now >= self._from:
            self.found.looks += 1
            self.found.longest_sum += max(len(s.waiting) for s in self._servers.values())

    def _report_of(self, number: int) -> Callable[[float], None]:
        def report(now: float) -> None:
            self._at(now + REPORT_S, report)
            loads = self._gateways[number].loads(0)
            name = GatewayId(f"g{number}")
            if message := self._reporting[number].next(name, "", loads, now):
                for other, dispatch in enumerate(self._gateways):
                    if other != number:
                        self._do(other, dispatch.on_load(message, now), now)

        return report


def _replica(number: int, capacity: float, slots: int) -> Instance:
    return Instance(
        id=InstanceId(f"i{number}"),
        stages=(Stage(NodeId(f"n{number}"), "", 0, 1),),
        state=InstanceState.SERVING,
        capacity=capacity,
        slots=slots,
        event=None,
    )
