"""Whatever happens to attempts, a request's tokens come out right, once each, and end once.

Nodes score prompts and generate the true tokens, some of which are lost, repeated or late; attempts
are refused and fail, instances come, move and vanish, clients leave, time passes.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.gateway.core.commands import (
    AskWhetherAlive,
    AskWhoDied,
    Command,
    Emit,
    End,
    Scored,
    Send,
    Withdraw,
)
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.requests import Request, State
from shared.errors import (
    BusTimeout,
    CapacityExceeded,
    LambdaScaleError,
    NoResponders,
    NotFound,
    PeerLost,
    StaleEpoch,
)
from shared.ids import EventId, GatewayId, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.serving import (
    AttemptFailed,
    Logprobs,
    Sampling,
    Scores,
    Submit,
    Token,
    Tokens,
)
from tests.support.amounts import examples

MODEL, NAME = ModelId("m0"), ModelName("m")
CHUNKS = 64, 40, 1
"""Tokens of a prompt that are scored at once, by attempt."""
PATIENCE_S, STALL_S, MAX_ATTEMPTS = 50.0, 20.0, 5
ERRORS = (CapacityExceeded, NotFound, NoResponders, BusTimeout, PeerLost)


def true_token(request: RequestId, index: int) -> int:
    return (int(request[1:]) * 7919 + index * 31) % 1000


@dataclass
class Attempt:
    """What the node that has it would do: the next index, up to the request's true end."""

    submit: Submit
    node: NodeId
    next: int
    sent: list[Scores | Token] = field(default_factory=list)


@dataclass
class Client:
    request: Request
    length: int
    finish: str
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ends: int = 0
    left: bool = False


class Streams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.asked: list[AskWhetherAlive | AskWhoDied] = []
        self.revision = 0
        self.numbers = count(1)
        self.drawn = 0.0
        rules = Rules(
            draw=self.draw,
            max_queue=50,
            queue_timeout_s=PATIENCE_S,
            stall_s=STALL_S,
            max_attempts=MAX_ATTEMPTS,
        )
        self.dispatch = Dispatch(rules)
        self.id = GatewayId("g")
        self.dispatch.take_id(self.id, 0.0)
        self.clients: dict[RequestId, Client] = {}
        self.attempts: dict[tuple[RequestId, int], Attempt] = {}
        self.live: set[tuple[RequestId, int]] = set()

    def draw(self) -> float:
        self.drawn = (self.drawn + 0.381966) % 1.0
        return self.drawn

    def run_commands(self, commands: list[Command]) -> None:
        for command in commands:
            assert command.cause, f"nothing caused {command}"
            match command:
                case Send(node, submit):
                    assert submit.cause == command.cause
                    self.check_submit(submit)
                    key = submit.request, submit.attempt
                    if key in self.live:
                        self.ask(key)
                        continue
                    scored = submit.score_from or submit.prompt_tokens
                    start = len(submit.tokens) - submit.prompt_tokens
                    start -= submit.prompt_tokens - scored
                    self.attempts[key] = Attempt(submit, node, start)
                    others = [live for live in self.live if live[0] == submit.request]
                    moves = self.clients[submit.request].request.state is State.MOVING
                    assert len(others) == int(moves)
                    self.live.add(key)
                case Withdraw(_, cancel):
                    self.live.discard((cancel.request, cancel.attempt))
                case Emit(request, token, finish, _):
                    client = self.clients[request]
                    assert not client.ends
                    assert not client.left
                    if client.request.score_from:
                        assert len(client.scores) == len(client.request.prompt) - 1
                    client.tokens.append(token)
                    client.ends += bool(finish)
                    if finish:
                        self.live -= {key for key in self.live if key[0] == request}
                case Scored(request, logprobs):
                    client = self.clients[request]
                    assert not client.ends
                    assert not client.left
                    assert not client.tokens
                    client.scores += [one.drawn for one in logprobs]
                case AskWhetherAlive() | AskWhoDied():
                    self.asked.append(command)
                case End(request, error):
                    client = self.clients[request]
                    assert isinstance(error, LambdaScaleError)
                    assert not client.left
                    client.ends += 1
                    assert not [key for key in self.live if key[0] == request]
                case _:
                    pass

    def ask(self, key: tuple[RequestId, int]) -> None:
        """The gateway asks a node whether it still has the attempt."""
        request, attempt = key
        if self.attempts[key].next >= self.clients[request].length:
            error = StaleEpoch("it is over")
            self.run_commands(self.dispatch.on_not_taken(request, attempt, error, self.now))

    def check_submit(self, submit: Submit) -> None:
        client = self.clients[submit.request]
        assert submit.gateway == self.id
        assert submit.tokens == (*client.request.prompt, *client.tokens)
        assert submit.prompt_tokens == len(client.request.prompt)
        assert len(client.tokens) < submit.max_tokens
        assert submit.score_from == (len(client.scores) + 1 if client.request.score_from else 0)

    # --- what happens --------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.dispatch.add_model(NAME, MODEL)

    @rule(
        prompt=st.integers(1, 200),
        length=st.integers(1, 8),
        at_limit=st.booleans(),
        scored=st.booleans(),
    )
    def admit(self, prompt: int, length: int, at_limit: bool, scored: bool) -> None:
        request = Request(
            id=RequestId(f"r{next(self.numbers)}"),
            model_id=MODEL,
            prompt=tuple(range(prompt)),
            max_tokens=length if at_limit else length + 40,
            stop_ids=(),
            sampling=Sampling(),
            waiting_since=self.now,
            score_from=int(scored),
        )
        finish = "length" if at_limit else "stop"
        self.clients[request.id] = Client(request, length, finish)
        try:
            self.run_commands(self.dispatch.admit([request], self.now))
        except CapacityExceeded:
            del self.clients[request.id]

    @rule(
        states=st.lists(
            st.tuples(st.integers(0, 5), st.sampled_from(InstanceState), st.integers(1, 3)),
            max_size=6,
            unique_by=lambda item: item[0],
        ),
        older=st.integers(0, 1),
    )
    def publish(self, states: list[tuple[int, InstanceState, int]], older: int) -> None:
        self.revision += 1
        instances = tuple(instance(number, state, slots) for number, state, slots in states)
        self.apply(instances, self.revision - 2 * older)

    def apply(self, instances: tuple[Instance, ...], revision: int) -> None:
        new = InstanceSet(
            name=NAME, model_id=MODEL, epoch=1, revision=revision, instances=instances
        )
        self.run_commands(self.dispatch.on_instances(new, self.now))

    @rule(
        picks=st.lists(
            st.tuples(
                st.integers(0, 1000), st.sampled_from(["next", "next", "next", "lose", "repeat"])
            ),
            max_size=12,
        )
    )
    def step(self, picks: list[tuple[int, str]]) -> None:
        """One message of tokens, of live attempts and of those that should be over."""
        keys = sorted(self.attempts)
        pieces: list[Scores | Token] = []
        for number, action in picks if keys else ():
            attempt = self.attempts[keys[number % len(keys)]]
            if action == "repeat":
                pieces += attempt.sent[-1:]
            elif (piece := self.generate(attempt)) and action == "next":
                pieces.append(piece)
        self.deliver(pieces)

    def generate(self, attempt: Attempt) -> Scores | Token | None:
        client = self.clients[attempt.submit.request]
        if attempt.next >= client.length:
            return None
        if attempt.next < 0:
            return self.score(attempt)
        index, attempt.next = attempt.next, attempt.next + 1
        finish = client.finish if attempt.next == client.length else ""
        value = true_token(client.request.id, index)
        token = Token(client.request.id, attempt.submit.attempt, index, value, finish)
        attempt.sent.append(token)
        return token

    def score(self, attempt: Attempt) -> Scores:
        """Token i of a prompt has the log probability i."""
        submit, first = attempt.submit, attempt.next
        attempt.next = min(first + CHUNKS[submit.attempt % len(CHUNKS)], 0)
        numbers = range(submit.prompt_tokens + first, submit.prompt_tokens + attempt.next)
        logprobs = tuple(Logprobs(float(number), ()) for number in numbers)
        scores = Scores(submit.request, submit.attempt, first, logprobs)
        attempt.sent.append(scores)
        return scores

    def deliver(self, pieces: list[Scores | Token], failed: tuple[AttemptFailed, ...] = ()) -> None:
        tokens = tuple(piece for piece in pieces if isinstance(piece, Token))
        scores = tuple(piece for piece in pieces if isinstance(piece, Scores))
        message = Tokens(node=NodeId("any"), tokens=tokens, failed=failed, scores=scores)
        self.run_commands(self.dispatch.on_tokens(message, self.now))

    @rule()
    def lose_the_id(self) -> None:
        """The gateway lost its lease, and has taken another."""
        before = set(self.live)
        self.id = GatewayId(f"g-{next(self.numbers)}")
        self.run_commands(self.dispatch.take_id(self.id, self.now))
        assert before.isdisjoint(self.live)

    @rule(number=st.integers(0, 1000), kind=st.sampled_from(ERRORS), refused=st.booleans())
    def fail(self, number: int, kind: type[LambdaScaleError], refused: bool) -> None:
        if not self.attempts:
            return
        keys = sorted(self.attempts)
        request, attempt = keys[number % len(keys)]
        if refused:
            commands = self.dispatch.on_not_taken(request, attempt, kind("no"), self.now)
            self.run_commands(commands)
        else:
            self.deliver([], (AttemptFailed(request, attempt, kind.code, "broke"),))

    @rule(number=st.integers(0, 1000))
    def take(self, number: int) -> None:
        """A node answers that it has an attempt."""
        if self.attempts:
            request, attempt = sorted(self.attempts)[number % len(self.attempts)]
            self.run_commands(self.dispatch.on_taken(request, attempt, self.now))

    @rule(dies=st.booleans())
    def judge(self, dies: bool) -> None:
        if self.asked:
            ask = self.asked.pop()
            dead = ask.nodes[:1] if dies else ()
            if isinstance(ask, AskWhoDied):
                found = self.dispatch.on_found_dead(ask.model_id, dead, self.now)
            else:
                found = self.dispatch.on_judged(ask.request, ask.attempt, dead, self.now)
            self.run_commands(found)

    @rule(number=st.integers(0, 6))
    def node_gone(self, number: int) -> None:
        self.run_commands(self.dispatch.on_node_gone(NodeId(f"n{number}"), self.now))

    @rule(number=st.integers(0, 1000), finish=st.booleans())
    def leave(self, number: int, finish: bool) -> None:
        if not self.clients:
            return
        client = self.clients[sorted(self.clients)[number % len(self.clients)]]
        end = self.dispatch.finish if finish else self.dispatch.cancel
        client.left = True
        self.run_commands(end(client.request.id, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0, 15.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.run_commands(self.dispatch.on_tick(self.now))

    # --- what holds ----------------------------------------------------------

    @invariant()
    def the_core_agrees_with_itself(self) -> None:
        self.dispatch.validate()

    @invariant()
    def tokens_are_the_true_ones(self) -> None:
        for client in self.clients.values():
            expected = [true_token(client.request.id, i) for i in range(len(client.tokens))]
            assert client.tokens == expected
            assert client.scores == [float(i) for i in range(1, len(client.scores) + 1)]
            assert client.ends <= 1

    @invariant()
    def counts_are_those_of_the_requests(self) -> None:
        open_ones = [c.request for c in self.clients.values() if not c.ends and not c.left]
        queued = [r for r in open_ones if r.state is State.QUEUED]
        moving = [r for r in open_ones if r.state is State.MOVING]
        running = [
            r for r in open_ones if r.state in (State.SUBMITTED, State.STREAMING, State.MOVING)
        ]
        assert len(queued) + len(running) == len(open_ones)
        (load,) = self.dispatch.loads(0)
        assert load.queued_requests == len(queued)
        assert load.running_requests == len(running) == len(self.live) - len(moving)
        assert load.running_tokens == sum(r.charge for r in running)
        assert all(r.instance is not None and r.charge > 0 for r in running)
        per_instance = Counter[InstanceId]()
        for r in running:
            assert r.instance is not None
            per_instance[r.instance] += 1
            assert (r.move is not None) == (r.state is State.MOVING)
            if r.move is not None:
                per_instance[r.move.instance] += 1
        assert per_instance == load.instance_requests

    def teardown(self) -> None:
        """Once one instance is sound, all that is left ends with the right tokens."""
        self.now += 1.0
        self.apply((instance(9, InstanceState.SERVING, 100),), self.revision + 2)
        while any(not client.ends and not client.left for client in self.clients.values()):
            live = [self.attempts[key] for key in sorted(self.live)]
            self.deliver([piece for attempt in live if (piece := self.generate(attempt))])
            self.now += STALL_S  # what was lost after its last token shows as a stall
            self.run_commands(self.dispatch.on_tick(self.now))
        for client in self.clients.values():
            assert client.ends == 1 or client.left
        (load,) = self.dispatch.loads(0)
        assert load.queued_requests == load.running_requests == load.running_tokens == 0


def instance(number: int, state: InstanceState, slots: int) -> Instance:
    """Replicas, and paths of two or three stages."""
    stages = tuple(
        Stage(NodeId(f"n{(number + i) % 7}"), "", i, i + 1) for i in range(1 + number % 3)
    )
    return Instance(
        id=InstanceId(f"i{number}"),
        stages=stages,
        state=state,
        capacity=1.0 / len(stages),
        slots=slots,
        event=EventId("e"),
    )


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
