"""Many models on few nodes: the planner's core with nodes that do what they are told, at once.

Arenas hold two models each. Whatever the models' loads do, no arena is ever given more than it
holds, no model is lost, and each model that has requests gets a replica in the end.
"""

import msgspec
from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.planner.core import commands
from services.planner.core.commands import Question
from services.planner.core.stimuli import Answer, Failed, Pinged, PoolRead, Replied
from shared.errors import CapacityExceeded, LambdaScaleError
from shared.ids import EventId, GatewayId, ModelId, ModelName
from shared.messages import Message, Ok
from shared.messages.instances import InstanceState
from shared.messages.load import GatewayLoad, ModelLoad
from shared.messages.pool import (
    Holding,
    ModelRecord,
    NodeJoined,
    NodeView,
    PoolState,
    Reserved,
    Source,
    Sources,
    Tier,
)
from tests.support.amounts import examples
from tests.unit.planner.driver import EVERY, Driver, id_of, info, model, settings, thought

NODES = ("a", "b")
NAMES = ("m0", "m1", "m2", "m3", "m4", "m5")
ROOM = 2
"""Models that an arena holds."""
SLOTS = 4
IDS = {name: id_of(name) for name in NAMES}
PRIORITY = {"m5": 1}


class MemoryShares(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(settings(scale_up_hold_s=0.1, idle_s=1.0))
        self.arenas: dict[str, dict[ModelId, Tier]] = {node: {} for node in NODES}
        """What lies in each node's arena. All models are on every disk."""
        self.reserved: dict[str, EventId] = {}
        self.queued = dict.fromkeys(NAMES, 0)
        """Requests of each model that wait, or run if it has a replica."""
        self.served = dict.fromkeys(NAMES, self.driver.at)
        """When each model last had a replica, or no request."""

    @initialize()
    def begin(self) -> None:
        for node in NODES:
            self.driver.feed(NodeJoined(info=info(node)))
            self.report(node)
        for name in NAMES:
            self.driver.publish(self.record(name))

    def record(self, name: str) -> ModelRecord:
        return msgspec.structs.replace(model(name), priority=PRIORITY.get(name, 0))

    @rule(name=st.sampled_from(NAMES), requests=st.integers(0, 3 * SLOTS))
    def load_changes(self, name: str, requests: int) -> None:
        self.queued[name] = requests
        self.tell_loads()

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0, 5.0)))
    def time_passes(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.step()

    def step(self) -> None:
        self.tell_loads()
        while self.driver.open:
            self.answer(self.driver.open.pop(0))
        for node in NODES:
            self.report(node)
        self.driver.wait(0.1)
        for name in NAMES:
            if not self.queued[name] or self.serving(name):
                self.served[name] = self.driver.at

    # --- the world ---

    def tell_loads(self) -> None:
        loads = []
        for name in NAMES:
            replicas = self.serving(name)
            slots = SLOTS * len(replicas)
            running = min(self.queued[name], slots)
            on = {f"replica-{node}": running // len(replicas) for node in replicas}
            load = ModelLoad(
                model=ModelName(name),
                queued_requests=self.queued[name] - running,
                queued_tokens=0,
                running_requests=running,
                running_tokens=0,
                instance_requests=on,  # type: ignore[arg-type]
            )
            loads.append(load)
        self.driver.feed(GatewayLoad(gateway=GatewayId("g"), models=tuple(loads)))

    def serving(self, name: str) -> list[str]:
        """Nodes whose replicas take requests. What ran on others has ended by now."""
        (found,) = (each for each in self.driver.core.sets() if each.name == name)
        return [i.leader for i in found.instances if i.state is InstanceState.SERVING]

    def report(self, node: str) -> None:
        self.driver.status(node, *self.holdings(node), free=self.free(node))

    def free(self, node: str) -> int:
        return 1000 - 400 * len(self.arenas[node])

    def holdings(self, node: str) -> tuple[Holding, ...]:
        in_arena = (Holding(id_, tier, EVERY) for id_, tier in self.arenas[node].items())
        return (*in_arena, *(Holding(id_, Tier.DISK, EVERY) for id_ in IDS.values()))

    def answer(self, question: Question) -> None:
        answer: Answer
        match question:
            case commands.MakePlan() | commands.Repair() | commands.Append() | commands.PlanPaths():
                answer = thought(question)
            case commands.Ping():
                answer = Pinged(question.ticket, True)
            case commands.ReadPool():
                answer = PoolRead(question.ticket, self.pool())
            case _:
                try:
                    answer = Replied(question.ticket, self.reply(question))
                except LambdaScaleError as error:
                    answer = Failed(question.ticket, error)
        self.driver.feed(answer)

    def reply(self, question: Question) -> Message:
        match question:
            case commands.Reserve(message=asked):
                fit = [
                    node
                    for node in NODES
                    if node not in (*self.reserved, *asked.exclude)
                    and (self.free(node) >= 400 or asked.model_id in self.arenas[node])
                ]
                for node in fit[: asked.count]:
                    self.reserved[node] = asked.event
                return Reserved(targets=tuple(info(node) for node in fit[: asked.count]))
            case commands.Unreserve(message=asked):
                self.reserved = {n: e for n, e in self.reserved.items() if e != asked.event}
            case commands.FindSources(message=asked):
                return Sources(sources=tuple(self.sources(asked.model_id)))
            case commands.SendPlan(message=plan):
                arena = self.arenas[plan.node]
                if plan.model_id not in arena and self.free(plan.node) < 400:
                    raise CapacityExceeded("the arena is full")
                arena[plan.model_id] = Tier.GPU
            case commands.Release(message=release):
                arena = self.arenas[release.node]
                if arena.pop(release.model_id, None) and release.keep is Tier.HOST:
                    arena[release.model_id] = Tier.HOST
        return Ok()

    def sources(self, id_: ModelId) -> list[Source]:
        found = []
        for node in NODES:
            tier = self.arenas[node].get(id_)
            if tier is not None:
                found.append(Source(info(node), tier, EVERY, True))
        return [*found, *(Source(info(node), Tier.DISK, EVERY, True) for node in NODES)]

    def pool(self) -> PoolState:
        views = (
            NodeView(
                info=info(node),
                holdings=self.holdings(node),
                arena_free=self.free(node),
                reserved_by=self.reserved.get(node),
            )
            for node in NODES
        )
        return PoolState(nodes=tuple(views), models=tuple(self.record(name) for name in NAMES))

    # --- what must hold ---

    @invariant()
    def no_arena_holds_more_than_it_can(self) -> None:
        assert all(len(arena) <= ROOM for arena in self.arenas.values())

    @invariant()
    def the_higher_priority_does_not_wait_long(self) -> None:
        assert self.driver.at - self.served["m5"] < 5.0

    @invariant()
    def nobody_starves(self) -> None:
        """Six models share the four places in turns of TURN_S."""
        for name in NAMES:
            assert self.driver.at - self.served[name] < 60.0

    def teardown(self) -> None:
        """All loads stay as they are: everybody has a turn, and nothing is lost."""
        for _ in range(400):
            self.step()
            self.nobody_starves()
        for name in NAMES:
            self.queued[name] = 0
        for _ in range(60):
            self.step()
        assert not any(self.driver.replicas(name) for name in NAMES)
        assert not self.reserved


TestMemoryShares = MemoryShares.TestCase
TestMemoryShares.settings = limits(max_examples=examples(8), stateful_step_count=15, deadline=None)
