"""What requests take of devices and of memory for KV.

An instance is shared by the requests that run on it, in equal parts: its clock goes as many seconds
a second as it is replicas, divided by the number of requests. What a request takes is what the
clock went while it ran (virtual time of processor sharing), so each step is O(1).
"""

from dataclasses import dataclass, field

from services.gateway.core.requests import Request
from services.gateway.core.routes import Route
from shared.ids import InstanceId


@dataclass(slots=True)
class _Instance:
    at: float
    clock: float = 0.0
    running: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    """Where the clock and the request were when it began there."""

    clock: float
    at: float
    context: int


@dataclass(slots=True)
class Meter:
    _instances: dict[InstanceId, _Instance] = field(default_factory=dict)
    _runs: dict[tuple[InstanceId, Request], _Run] = field(default_factory=dict)

    def begin(self, route: Route, request: Request, now: float) -> None:
        key = route.instance.id
        instance = self._instances.setdefault(key, _Instance(now))
        _advance(instance, route, now)
        instance.running += 1
        self._runs[key, request] = _Run(instance.clock, now, _context(request))

    def end(self, route: Route, request: Request, now: float) -> None:
        key = route.instance.id
        instance, run = self._instances[key], self._runs.pop((key, request))
        _advance(instance, route, now)
        instance.running -= 1
        request.device_s += instance.clock - run.clock
        request.kv_token_s += (now - run.at) * (run.context + _context(request)) / 2
        if not instance.running:
            del self._instances[key]


def _advance(instance: _Instance, route: Route, now: float) -> None:
    """To be called before the number of its requests changes."""
    if instance.running:
        sharing = instance.running + route.others.requests
        instance.clock += (now - instance.at) * route.instance.capacity / sharing
    instance.at = now


def _context(request: Request) -> int:
    """The tokens whose KV it has, about."""
    return len(request.prompt) + len(request.tokens)
