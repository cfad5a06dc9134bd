"""Gateways without clients, which say on the bus what gateways say under a steady load."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.control_plane.scene import Scene
from services.gateway.core.reporting import Reporting
from services.gateway.service import LOAD_S
from shared import subjects
from shared.bus.base import Bus
from shared.ids import GatewayId, InstanceId, ModelName
from shared.messages.load import WHOLE_S, ModelLoad

PROMPT_TOKENS = 512
TOKENS_PER_S = 25
FIRST_S = 0.15
"""How long a request waits for its first token."""


@dataclass(slots=True)
class Asked:
    model: ModelName
    instance: InstanceId
    at: float
    ends_at: float


@dataclass
class Gateway:
    """Requests end at random, and others begin in their place."""

    id: GatewayId
    scene: Scene
    requests: int
    """How many run at any time."""
    draw: random.Random
    running: list[Asked] = field(default_factory=list)
    asked: Counter[ModelName] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.instances = self.scene.instances()

    def loads(self, now: float) -> list[ModelLoad]:
        self.running = [each for each in self.running if each.ends_at > now]
        while len(self.running) < self.requests:
            model, instance = self.draw.choice(self.instances)
            ends_at = now + self.draw.expovariate(1 / self.scene.stay_s)
            self.running.append(Asked(model, instance, now, ends_at))
            self.asked[model] += 1
        by_model: dict[ModelName, list[Asked]] = {ModelName(n): [] for n in self.scene.names}
        for each in self.running:
            by_model[each.model].append(each)
        return [self._model(name, running, now) for name, running in by_model.items()]

    def _model(self, name: ModelName, running: list[Asked], now: float) -> ModelLoad:
        first = [each.at for each in running if now < each.at + FIRST_S]
        return ModelLoad(
            model=name,
            running_requests=len(running),
            running_tokens=int(sum(each.ends_at - now for each in running) * TOKENS_PER_S),
            prompt_tokens=len(first) * PROMPT_TOKENS,
            waiting_since_ns=round(min(first, default=0.0) * 1e9),
            asked_requests=self.asked[name],
            asked_tokens=self.asked[name] * PROMPT_TOKENS,
            instance_requests=Counter(each.instance for each in running),
        )


async def report(bus: Bus, gateway: Gateway, offset: float) -> None:
    loop = asyncio.get_running_loop()
    at = loop.time() + offset
    reporting = Reporting(WHOLE_S)
    while True:
        await asyncio.sleep(at - loop.time())
        loads = gateway.loads(loop.time())
        if said := reporting.next(gateway.id, "http://10.0.0.1:8000", loads, loop.time()):
            await bus.publish(subjects.LOAD_GATEWAY, said)
        at = max(at + LOAD_S, loop.time())


async def run(bus: Bus, scene: Scene) -> None:
    async with asyncio.TaskGroup() as tasks:
        for index in range(scene.gateways):
            requests = scene.requests(index)
            gateway = Gateway(scene.gateway(index), scene, requests, random.Random(index))
            tasks.create_task(report(bus, gateway, index / scene.gateways * LOAD_S))
