"""A request that kills what runs it takes two nodes at most, and nobody else is refused.

Gateways' cores, and nodes that take attempts, run them and die. Gateways hear of deaths at any
time, each from another side. Planners change while nobody looks. Prompts are short, and no message
is lost.
"""

from dataclasses import dataclass, field
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.core.commands import (
    AskWhetherAlive,
    AskWhoDied,
    Broken,
    Command,
    Emit,
    End,
    Send,
    Withdraw,
)
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.requests import Request
from shared.errors import (
    CapacityExceeded,
    LambdaScaleError,
    NoResponders,
    PeerLost,
    RequestKillsNodes,
    SourceLost,
    StaleEpoch,
)
from shared.ids import GatewayId, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Role, Stage
from shared.messages.load import GatewayLoad
from shared.messages.serving import AttemptFailed, Sampling, Submit, Token, Tokens
from tests.support.amounts import examples

MODEL, NAME = ModelId("m0"), ModelName("m")
INSTANCES = 6
SLOTS = 3
PATIENCE_S = 1e9
TOKENS = 8
"""How many each request asks for."""
KILLS = 2
"""How many nodes a request may kill."""
KILLER = RequestId("killer")
Nodes = tuple[NodeId, ...]
Key = tuple[RequestId, int]


@dataclass
class Attempt:
    """As the nodes of its path know it."""

    gateway: int
    submit: Submit
    waits_for: Key | None
    """The attempt that has to end before this one runs."""
    next: int

    @property
    def nodes(self) -> Nodes:
        return tuple(stage.node for stage in self.submit.stages)

    @property
    def on_trial(self) -> bool:
        return self.submit.prompt_tokens + self.next < self.submit.alone_until


@dataclass
class World:
    kills_at: int
    now: float = 0.0
    epoch: int = 1
    revision: int = 0
    gateways: list[Dispatch] = field(default_factory=list)
    instances: list[tuple[Nodes, Role]] = field(default_factory=list)
    dead: set[NodeId] = field(default_factory=set)
    unheard: list[tuple[int, NodeId]] = field(default_factory=list)
    """Deaths that gateways have not been told of."""
    sends: list[tuple[int, Send]] = field(default_factory=list)
    answers: list[tuple[int, AskWhetherAlive, tuple[NodeId, ...]]] = field(default_factory=list)
    """To questions which nodes live, each with those that do not."""
    attempts: dict[Key, Attempt] = field(default_factory=dict)
    newest: dict[tuple[NodeId, RequestId], int] = field(default_factory=dict)
    """The newest attempt of each request that each node has heard of."""
    ids: int = 0
    asked: int = 0
    ends: dict[RequestId, LambdaScaleError | None] = field(default_factory=dict)
    killed: int = 0

    def do(self, gateway: int, commands: list[Command]) -> None:
        self.gateways[gateway].validate()
        for command in commands:
            match command:
                case Send():
                    self.sends.append((gateway, command))
                case Withdraw(node, cancel):
                    self.attempts.pop((cancel.request, cancel.attempt), None)
                    newest = self.newest.get((node, cancel.request), 0)
                    self.newest[node, cancel.request] = max(newest, cancel.attempt)
                case AskWhetherAlive(nodes=nodes):
                    dead = tuple(node for node in nodes if node in self.dead)
                    self.answers.append((gateway, command, dead))
                case AskWhoDied(model_id, nodes):
                    dead = tuple(node for node in nodes if node in self.dead)
                    self.do(gateway, self.gateways[gateway].on_found_dead(model_id, dead, self.now))
                case Emit(request, _, finish) if finish:
                    self.ends[request] = None
                case End(request, error):
                    self.ends[request] = error
                case Broken(_, error):
                    raise error
                case _:
                    pass

    # --- what gateways are told ---

    def admit(self, gateway: int, name: RequestId) -> None:
        self.asked += 1
        request = Request(name, MODEL, (1, 2, 3), TOKENS, (), Sampling(), self.now)
        self.do(gateway, self.gateways[gateway].admit([request], self.now))

    def publish(self, gateway: int, *, knows: bool = True) -> None:
        """`knows`: the planner knows who is dead."""
        self.revision += 1
        new = InstanceSet(
            name=NAME,
            model_id=MODEL,
            epoch=self.epoch,
            revision=self.revision,
            instances=tuple(
                instance(self.epoch, nodes, role)
                for nodes, role in self.instances
                if not (knows and self.dead.intersection(nodes))
            ),
            node_slots={node: SLOTS for nodes, _ in self.instances for node in nodes},
        )
        self.do(gateway, self.gateways[gateway].on_instances(new, self.now))

    def hear(self, number: int) -> None:
        gateway, node = self.unheard.pop(number)
        self.do(gateway, self.gateways[gateway].on_node_gone(node, self.now))

    def judge(self, number: int) -> None:
        gateway, ask, dead = self.answers.pop(number)
        core = self.gateways[gateway]
        self.do(gateway, core.on_judged(ask.request, ask.attempt, dead, self.now))

    def lose_the_id(self, gateway: int) -> None:
        self.ids += 1
        core, name = self.gateways[gateway], GatewayId(f"g{gateway}-{self.ids}")
        self.do(gateway, core.take_id(name, self.now))

    def tell(self, gateway: int) -> None:
        """The other gateways hear its load."""
        load = GatewayLoad(
            gateway=GatewayId(f"g{gateway}"),
            seq=round(self.now * 1e6),
            models=self.gateways[gateway].loads(0),
        )
        for number, other in enumerate(self.gateways):
            if number != gateway:
                self.do(number, other.on_load(load, self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for number, gateway in enumerate(self.gateways):
            self.do(number, gateway.on_tick(self.now))

    # --- what nodes do ---

    def deliver(self, number: int) -> None:
        gateway, send = self.sends.pop(number)
        submit, core = send.submit, self.gateways[gateway]
        error = self._take(gateway, submit)
        if error:
            answer = core.on_not_taken(submit.request, submit.attempt, error, self.now)
        elif self.attempts[submit.request, submit.attempt].waits_for:
            return  # answered once the attempt before has ended
        else:
            answer = core.on_taken(submit.request, submit.attempt, self.now)
        self.do(gateway, answer)

    def _take(self, gateway: int, submit: Submit) -> LambdaScaleError | None:
        nodes = tuple(stage.node for stage in submit.stages)
        key = submit.request, submit.attempt
        if nodes[0] in self.dead:
            return NoResponders("it is dead")
        if key in self.attempts:
            return None
        for other in self.attempts.values():
            trial = other.on_trial and other.submit.request != submit.request
            if trial and not set(nodes).isdisjoint(other.nodes):
                return CapacityExceeded("a suspect is tried")
        if submit.attempt <= self.newest.get((nodes[0], submit.request), 0):
            return StaleEpoch("it is over")
        if submit.alone_until and self.dead.intersection(nodes):
            return CapacityExceeded("a node of the path does not answer")
        self.newest[nodes[0], submit.request] = submit.attempt
        before = (submit.request, submit.takes_over) if submit.kv_from else None
        start = len(submit.tokens) - submit.prompt_tokens
        self.attempts[key] = Attempt(gateway, submit, before, start)
        return None

    def run(self, key: Key) -> None:
        """One step of an attempt, or of what it waits for."""
        attempt = self.attempts[key]
        submit, core = attempt.submit, self.gateways[attempt.gateway]
        if lost := self.dead.intersection(attempt.nodes):
            del self.attempts[key]
            self._fail(attempt, PeerLost(f"{lost}"))
        elif attempt.waits_for:
            if self.dead.intersection(stage.node for stage in submit.kv_from):
                del self.attempts[key]
                self._fail(attempt, SourceLost("it died"))
                return
            source = self.attempts.pop(attempt.waits_for, None)
            attempt.waits_for = None
            attempt.next = source.next if source else attempt.next
            self.do(attempt.gateway, core.on_taken(*key, self.now))
        elif submit.request == KILLER and attempt.next == self.kills_at:
            self.killed += 1
            self.kill(attempt.nodes[0])
        else:
            index, attempt.next = attempt.next, attempt.next + 1
            finish = "length" if attempt.next == TOKENS else ""
            if finish:
                del self.attempts[key]
            token = Token(*key, index, index, finish)
            said = Tokens(node=attempt.nodes[0], tokens=(token,))
            self.do(attempt.gateway, core.on_tokens(said, self.now))

    def back(self, node: NodeId) -> None:
        """The node's next process begins."""
        self.dead.remove(node)
        self.newest = {key: last for key, last in self.newest.items() if key[0] != node}

    def _fail(self, attempt: Attempt, error: LambdaScaleError) -> None:
        submit = attempt.submit
        failed = AttemptFailed(submit.request, submit.attempt, error.code, str(error))
        said = Tokens(node=attempt.nodes[0], tokens=(), failed=(failed,))
        self.do(attempt.gateway, self.gateways[attempt.gateway].on_tokens(said, self.now))

    def kill(self, node: NodeId) -> None:
        self.dead.add(node)
        self.unheard += [(gateway, node) for gateway in range(len(self.gateways))]
        self.attempts = {k: a for k, a in self.attempts.items() if a.nodes[0] != node}


def instance(epoch: int, nodes: Nodes, role: Role) -> Instance:
    """Another planner names paths anew."""
    name = f"replica-{nodes[0]}" if len(nodes) == 1 else f"path-{epoch}-{'-'.join(nodes)}"
    return Instance(
        id=InstanceId(name),
        stages=tuple(Stage(node, "", at, at + 1) for at, node in enumerate(nodes)),
        state=InstanceState.SERVING,
        capacity=1.0,
        slots=SLOTS,
        event=None,
        role=role,
    )


def world(draw: st.DataObject) -> World:
    made = World(kills_at=draw.draw(st.integers(0, TOKENS - 1)))
    apart = draw.draw(st.booleans())
    roles = (Role.PREFILL, Role.DECODE) if apart else (Role.BOTH,)
    names = (NodeId(f"n{number}") for number in count())
    for index in range(INSTANCES):
        stages = 1 if apart else draw.draw(st.sampled_from([1, 1, 2]))
        nodes = tuple(next(names) for _ in range(stages))
        made.instances.append((nodes, roles[index % len(roles)]))
    for gateway in range(draw.draw(st.integers(1, 2))):
        picks = draw.draw(st.randoms(use_true_random=False))
        made.gateways.append(Dispatch(Rules(picks.random, 100, PATIENCE_S, 30.0, 100)))
        made.do(gateway, made.gateways[gateway].take_id(GatewayId(f"g{gateway}"), 0.0))
        made.gateways[gateway].add_model(NAME, MODEL)
        made.publish(gateway)
    return made


def happen(made: World, draw: st.DataObject) -> None:
    """One thing, of those that can happen now."""
    choices: list[tuple[str, object]] = [("wait", None), ("planner", None), ("tell", None)]
    choices += [("deliver", n) for n in range(len(made.sends))] * 3
    choices += [("run", key) for key in made.attempts] * 3
    choices += [("hear", n) for n in range(len(made.unheard))]
    choices += [("judge", n) for n in range(len(made.answers))]
    choices += [("publish", gateway) for gateway in range(len(made.gateways))]
    choices += [("id", gateway) for gateway in range(len(made.gateways))]
    busy = {node for _, node in made.unheard} | {send.node for _, send in made.sends}
    choices += [("back", node) for node in sorted(made.dead - busy)]
    what, which = draw.draw(st.sampled_from(choices))
    match what, which:
        case "deliver", int(number):
            made.deliver(number)
        case "run", (request, int(attempt)):
            made.run((RequestId(str(request)), attempt))
        case "hear", int(number):
            made.hear(number)
        case "judge", int(number):
            made.judge(number)
        case "publish", int(gateway):
            made.publish(gateway)
        case "id", int(gateway):
            made.lose_the_id(gateway)
        case "back", str(node):
            made.back(NodeId(node))
        case "planner", _:
            made.epoch += 1
            knows = draw.draw(st.booleans())
            for gateway in range(len(made.gateways)):
                made.publish(gateway, knows=knows)
        case "tell", _:
            made.tell(draw.draw(st.integers(0, len(made.gateways) - 1)))
        case _:
            made.wait(draw.draw(st.sampled_from([0.01, 0.1, 0.5])))


def settle(made: World) -> None:
    for _ in range(1000):
        while made.sends:
            made.deliver(0)
        for key in list(made.attempts):
            if key in made.attempts:
                made.run(key)
        while made.unheard:
            made.hear(0)
        while made.answers:
            made.judge(0)
        for gateway in range(len(made.gateways)):
            made.publish(gateway)
        made.wait(0.3)
        if len(made.ends) == made.asked:
            return
    raise AssertionError("never settles")


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_a_killer_takes_two_nodes_and_nobody_else_is_refused(draw: st.DataObject) -> None:
    made = world(draw)
    names = [RequestId(f"r{i}") for i in range(draw.draw(st.integers(0, 7)))]
    names.insert(draw.draw(st.integers(0, len(names))), KILLER)
    for name in names:
        made.admit(draw.draw(st.integers(0, len(made.gateways) - 1)), name)
    for _ in range(draw.draw(st.integers(0, 100))):
        happen(made, draw)
    settle(made)
    assert isinstance(made.ends.pop(KILLER), RequestKillsNodes)
    assert made.killed <= KILLS
    assert not any(made.ends.values())
