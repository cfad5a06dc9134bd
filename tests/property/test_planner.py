"""The planner's core among nodes that die and answers that come late, twice, in any order or never.

After every stimulus the core's state is valid and it complains of nothing (`CheckedCore`); sets
count no node twice; and once everything is answered again, the planner comes to rest with what it
should have.
"""

from hypothesis import settings as limits
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.planner.core import commands
from services.planner.core.commands import Question
from services.planner.core.event_base import THINK_S
from services.planner.core.stimuli import Answer, Asked, Failed, Pinged, PoolRead, Replied
from shared.errors import BusTimeout, LambdaScaleError, NoResponders, PeerLost, StaleEpoch
from shared.ids import Generation, ModelName, NodeId
from shared.messages import Message, Ok
from shared.messages.pool import (
    Holding,
    ModelRemoved,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeView,
    PoolState,
    Reserved,
    Source,
    Sources,
    Tier,
)
from shared.messages.scaling import ApplyPlan, BlockArrived, PeerSuspect, PullFailed, SetInstances
from simulation.instance_sets import of_set
from tests.support.amounts import examples
from tests.unit.planner.driver import EVERY, WALL_NS, Driver, info, settings, thought
from tests.unit.planner.scripted import BLOCK_BYTES, BLOCKS, MODEL, NAME, record

NODES = ("a", "b", "c", "d")
DISK = "a"
"""Who has the model on disk, whenever it lives."""
some_node = st.sampled_from(NODES)
any_index = st.integers(0, 1000)


class Nodes:
    """What nodes really are and hold."""

    def __init__(self) -> None:
        self.generation = dict.fromkeys(NODES, 1)
        self.live = set(NODES)
        self.gpu: dict[str, set[int]] = {}
        self.host: set[str] = set()
        self.plans: dict[str, ApplyPlan] = {}
        self.reserved: dict[str, str] = {}

    def info(self, node: str) -> NodeInfo:
        return info(node, self.generation[node])

    def die(self, node: str) -> None:
        self.live.discard(node)
        self.gpu.pop(node, None)
        self.plans.pop(node, None)
        self.reserved.pop(node, None)
        self.host.discard(node)

    def holdings(self, node: str) -> tuple[Holding, ...]:
        held = []
        if node in self.gpu:
            held.append(Holding(MODEL, Tier.GPU, tuple(sorted(self.gpu[node]))))
        if node in self.host:
            held.append(Holding(MODEL, Tier.HOST, EVERY))
        if node == DISK:
            held.append(Holding(MODEL, Tier.DISK, EVERY))
        return tuple(held)

    def sources(self) -> tuple[Source, ...]:
        found = []
        for node in sorted(self.live):
            if len(self.gpu.get(node, ())) == BLOCKS:
                found.append(Source(self.info(node), Tier.GPU, EVERY, True))
            elif node in self.host:
                found.append(Source(self.info(node), Tier.HOST, EVERY, True))
            elif node == DISK:
                found.append(Source(self.info(node), Tier.DISK, EVERY, True))
        return tuple(found)

    def is_there(self, node: str, generation: int) -> bool:
        return node in self.live and self.generation[node] == generation

    def may_arrive(self, node: str) -> list[tuple[int, str]]:
        """(block, source) of all that its plan may bring it now."""
        plan, held = self.plans.get(node), self.gpu.get(node, set())
        if plan is None or node not in self.live:
            return []
        own = [(block, node) for block in plan.promote if block not in held]
        pulls = [
            (pull.block, str(pull.source))
            for pull in plan.pulls
            if pull.block not in held and self._has(pull.source, pull.block)
        ]
        return own + pulls

    def _has(self, node: str, block: int) -> bool:
        there = node in self.host or node == DISK or block in self.gpu.get(node, ())
        return node in self.live and there


class PlannerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = Nodes()
        self.driver = Driver(settings(scale_up_hold_s=0.1, idle_s=1.0))
        self.given: list[Answer] = []
        """All answers so far."""
        self.queued = 0

    @initialize()
    def begin(self) -> None:
        for node in NODES:
            self.driver.feed(NodeJoined(info=self.nodes.info(node)))
            self.report(node)
        self.driver.publish(record(min_instances=1))

    # --- nodes, gateways, operators ---

    @rule(node=some_node)
    def report(self, node: str) -> None:
        if node in self.nodes.live:
            self.driver.status(
                node, *self.nodes.holdings(node), generation=self.nodes.generation[node]
            )

    @rule(node=some_node, which=any_index, heard=st.booleans())
    def block_lands(self, node: str, which: int, heard: bool) -> None:
        if may := self.nodes.may_arrive(node):
            block, source = may[which % len(may)]
            self.nodes.gpu[node].add(block)
            if heard:
                self._tell_arrival(node, block, source)

    def _tell_arrival(self, node: str, block: int, source: str) -> None:
        plan, at = self.nodes.plans[node], WALL_NS + round(self.driver.at * 1e9)
        message = BlockArrived(
            event=plan.event,
            revision=plan.revision,
            node=NodeId(node),
            generation=Generation(self.nodes.generation[node]),
            model_id=MODEL,
            block=block,
            source=NodeId(source),
            transport="tcp",
            nbytes=BLOCK_BYTES,
            started_ns=at,
            first_byte_ns=at,
            finished_ns=at,
            ready_ns=at,
        )
        self.driver.feed(message)

    @rule(node=some_node, which=any_index)
    def pull_fails(self, node: str, which: int) -> None:
        plan = self.nodes.plans.get(node)
        if plan is None or not plan.pulls:
            return
        pull = plan.pulls[which % len(plan.pulls)]
        failed = PullFailed(
            event=plan.event,
            revision=plan.revision,
            node=NodeId(node),
            generation=Generation(self.nodes.generation[node]),
            block=pull.block,
            source=pull.source,
            code=PeerLost.code,
            message="reset",
        )
        self.driver.feed(failed)

    @rule(node=some_node, told=st.booleans())
    def dies(self, node: str, told: bool) -> None:
        if len(self.nodes.live) > 1 and node in self.nodes.live:
            self.nodes.die(node)
            if told:
                self._tell_gone(node)

    def _tell_gone(self, node: str) -> None:
        generation = Generation(self.nodes.generation[node])
        self.driver.feed(NodeGone(node=NodeId(node), generation=generation, reason="expired"))

    @rule(node=some_node, told=st.booleans())
    def comes_back(self, node: str, told: bool) -> None:
        if node not in self.nodes.live:
            self.nodes.generation[node] += 1
            self.nodes.live.add(node)
            if told:
                self.driver.feed(NodeJoined(info=self.nodes.info(node)))

    @rule(node=some_node)
    def is_suspected(self, node: str) -> None:
        self.driver.feed(PeerSuspect(reporter=NodeId("z"), node=NodeId(node), reason="reset"))

    @rule(queued=st.integers(0, 30))
    def load_comes(self, queued: int) -> None:
        self.queued = queued
        self.driver.load(queued=queued)

    @rule(count=st.none() | st.integers(0, 4))
    def operator_asks(self, count: int | None) -> None:
        found = self.driver.feed(Asked(1, SetInstances(name=NAME, instances=count)))
        assert sum(isinstance(command, commands.Answer) for command in found) == 1

    @rule()
    def model_is_replaced(self) -> None:
        self.driver.feed(ModelRemoved(name=NAME, model_id=MODEL))
        self.driver.publish(record(min_instances=1))

    @rule()
    def another_planner_takes_over(self) -> None:
        self.driver.replace_planner()

    @rule(seconds=st.sampled_from((0.005, 0.05, 0.5, 3.0)))
    def time_passes(self, seconds: float) -> None:
        self.driver.wait(seconds)

    # --- answers, as they come ---

    @rule(which=any_index)
    def answered(self, which: int) -> None:
        if question := self._take(which):
            self._give(self._right(question))

    @rule(queued=st.integers(8, 30))
    def load_grows_while_an_event_runs(self, queued: int) -> None:
        """All is answered meanwhile, so that the event gets far enough to grow."""
        for waiting in (3, queued):
            self.load_comes(waiting)
            self.driver.wait(0.2)
            for _ in range(4):
                questions, self.driver.open = self.driver.open, []
                for question in questions:
                    self._give(self._right(question))

    @rule(which=any_index)
    def failed(self, which: int) -> None:
        if question := self._take(which):
            self._give(Failed(question.ticket, BusTimeout("no answer")))

    @rule(which=any_index)
    def done_but_the_answer_is_lost(self, which: int) -> None:
        if question := self._take(which):
            self._right(question)

    @rule(which=any_index)
    def repeated(self, which: int) -> None:
        if self.given:
            assert not any(
                isinstance(command, Question)
                for command in self.driver.feed(self.given[which % len(self.given)])
            )

    def _take(self, which: int) -> Question | None:
        return self.driver.open.pop(which % len(self.driver.open)) if self.driver.open else None

    def _give(self, answer: Answer) -> None:
        self.given.append(answer)
        self.driver.feed(answer)

    def _right(self, question: Question) -> Answer:
        """Does what is asked, and says what came of it."""
        match question:
            case commands.MakePlan() | commands.Repair() | commands.Append() | commands.PlanPaths():
                try:
                    return thought(question)
                except LambdaScaleError as error:
                    return Failed(question.ticket, error)
            case commands.Ping():
                return Pinged(question.ticket, question.node in self.nodes.live)
            case commands.ReadPool():
                return PoolRead(question.ticket, self._pool())
        try:
            return Replied(question.ticket, self._reply(question))
        except LambdaScaleError as error:
            return Failed(question.ticket, error)

    def _reply(self, question: Question) -> Message:
        nodes = self.nodes
        match question:
            case commands.Reserve(message=asked):
                free = [n for n in sorted(nodes.live) if n not in (*nodes.reserved, *asked.exclude)]
                for node in free[: asked.count]:
                    nodes.reserved[node] = asked.event
                return Reserved(targets=tuple(nodes.info(n) for n in free[: asked.count]))
            case commands.Unreserve(message=asked):
                nodes.reserved = {n: e for n, e in nodes.reserved.items() if e != asked.event}
            case commands.FindSources():
                return Sources(sources=nodes.sources())
            case commands.SendPlan(message=plan):
                self._check(plan.node, plan.generation)
                held = set(EVERY) if plan.node in nodes.host else set[int]()
                nodes.host.discard(plan.node)
                nodes.gpu.setdefault(plan.node, held)
                nodes.plans[plan.node] = plan
            case commands.Release(message=release):
                self._check(release.node, release.generation)
                nodes.plans.pop(release.node, None)
                whole = len(nodes.gpu.pop(release.node, ())) == BLOCKS or release.node in nodes.host
                nodes.host.discard(release.node)
                if whole and release.keep is Tier.HOST:
                    nodes.host.add(release.node)
        return Ok()

    def _check(self, node: str, generation: int) -> None:
        if node not in self.nodes.live:
            raise NoResponders(f"nobody is {node}")
        if self.nodes.generation[node] != generation:
            raise StaleEpoch("another generation")

    def _pool(self) -> PoolState:
        nodes = self.nodes
        views = (
            NodeView(
                info=nodes.info(node),
                holdings=nodes.holdings(node),
                arena_free=500,
                reserved_by=nodes.reserved.get(node),  # type: ignore[arg-type]
            )
            for node in sorted(nodes.live)
        )
        return PoolState(nodes=tuple(views), models=(record(min_instances=1),))

    # --- what must hold ---

    @invariant()
    def sets_make_sense(self) -> None:
        for each in self.driver.core.sets():
            assert not of_set(each, BLOCKS)
        revisions = [(each.epoch, each.revision) for each in self.driver.sets]
        assert revisions == sorted(revisions)

    def teardown(self) -> None:
        """All is answered from now on: the planner comes to rest."""
        driver, nodes = self.driver, self.nodes
        driver.feed(Asked(1, SetInstances(name=NAME, instances=None)))
        for round_ in range(400):
            if round_ == 220:  # an event may have run until now, because an answer was lost
                driver.feed(Asked(1, SetInstances(name=NAME, instances=None)))
            driver.load(queued=0)
            while driver.open:
                self._give(self._right(driver.open.pop(0)))
            for node in NODES:
                self.report(node)
                for block, source in nodes.may_arrive(node):
                    nodes.gpu[node].add(block)
                    self._tell_arrival(node, block, source)
            # Longer at first: an answer of a thread counts as lost after THINK_S.
            driver.wait(THINK_S / 200 if round_ < 200 else 0.25)
        machine = driver.core._machines.named[ModelName(NAME)]
        story = [f"{told.at:.2f} {told.cause}: {told.text}" for told in driver.core.story(MODEL)]
        assert not machine.standing.count, story
        if nodes.sources():
            assert len(driver.replicas()) == 1, story
            assert not machine.scaling, story
            assert sum(len(held) == BLOCKS for held in nodes.gpu.values()) == 1, story
            assert not nodes.reserved


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = limits(max_examples=examples(12), stateful_step_count=30, deadline=None)
