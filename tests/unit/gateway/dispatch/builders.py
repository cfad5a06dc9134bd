"""A dispatch core by itself, and what the tests read out of its commands."""

from services.gateway.core.commands import Command, Emit, End, Scored, Send, Withdraw
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.fair_queue import ALONE, Share
from services.gateway.core.ledger import Rules
from services.gateway.core.requests import Request
from services.gateway.core.routing import OURS, Routing
from shared.errors import CapacityExceeded
from shared.ids import GatewayId, ModelId, ModelName, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState
from shared.messages.serving import Logprobs, Sampling, Scores, Token, Tokens
from tests.unit.gateway.support import path, replica

NAME, MODEL = ModelName("m"), ModelId("m-id")


STALL_S = 20.0


QUEUE, QUEUE_S = 50, 60.0


class Driver:
    """A dispatch core with one model and its own time."""

    def __init__(self, *instances: Instance, routing: Routing = OURS, check_s: float = 0.0) -> None:
        rules = Rules(lambda: 0.0, QUEUE, QUEUE_S, STALL_S, 3, routing=routing, check_s=check_s)
        self.dispatch = Dispatch(rules)
        self.dispatch.take_id(GatewayId("g"), 0.0)
        self.dispatch.add_model(NAME, MODEL)
        self.now = 0.0
        self.epoch = 1
        self.revision = 0
        self.publish(*instances)

    def publish(
        self,
        *instances: Instance,
        step_s: float = 0.0,
        kv_s: float = 0.0,
        node_slots: int = 8,
        fixed: int | None = None,
        within_s: float = 0.0,
    ) -> list[Command]:
        """`step_s`: what they say that any pass takes, and each token more in it. `kv_s`: what the
        KV of a position takes to move."""
        self.revision += 1
        new = InstanceSet(
            name=NAME,
            model_id=MODEL,
            epoch=self.epoch,
            revision=self.revision,
            instances=instances,
            node_slots={s.node: node_slots for i in instances for s in i.stages},
            fixed=fixed,
            within_s=within_s,
            decode_s=step_s,
            prefill_s_per_token=step_s,
            kv_s_per_token=kv_s,
        )
        return self.dispatch.on_instances(new, self.now)

    def admit(
        self,
        *names: str,
        prompt: int = 4,
        max_tokens: int = 100,
        score_from: int = 0,
        logprobs: int | None = None,
        share: Share = ALONE,
    ) -> list[Command]:
        requests = [
            Request(
                RequestId(name),
                MODEL,
                tuple(range(prompt)),
                max_tokens,
                (),
                Sampling(logprobs=logprobs),
                self.now,
                score_from=score_from,
                share=share,
            )
            for name in names
        ]
        return self.dispatch.admit(requests, self.now)

    def give(self, name: str, attempt: int, index: int, finish: str = "") -> list[Command]:
        token = Token(RequestId(name), attempt, index, 7, finish)
        message = Tokens(node=replica(1).leader, tokens=(token,))
        return self.dispatch.on_tokens(message, self.now)

    def score(self, name: str, attempt: int, index: int, *logprobs: float) -> list[Command]:
        found = tuple(Logprobs(one, ()) for one in logprobs)
        scores = Scores(RequestId(name), attempt, index, found)
        message = Tokens(node=replica(1).leader, tokens=(), scores=(scores,))
        return self.dispatch.on_tokens(message, self.now)

    def take(self, name: str, attempt: int) -> list[Command]:
        return self.dispatch.on_taken(RequestId(name), attempt, self.now)

    def refuse(self, name: str, attempt: int) -> list[Command]:
        error = CapacityExceeded("full")
        return self.dispatch.on_not_taken(RequestId(name), attempt, error, self.now)

    def later(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.dispatch.on_tick(self.now)


def sent(commands: list[Command]) -> list[tuple[str, str, int]]:
    return [
        (command.submit.request, command.submit.instance, command.submit.attempt)
        for command in commands
        if isinstance(command, Send)
    ]


def ended(commands: list[Command]) -> list[tuple[RequestId, str]]:
    return [(c.request, str(c.error)) for c in commands if isinstance(c, End)]


def told(commands: list[Command]) -> list[float]:
    """The log probabilities that a client gets."""
    return [one.drawn for c in commands if isinstance(c, Scored) for one in c.logprobs]


MOVING = path(1, 2, state=InstanceState.MOVING)


def moving(*tokens: int) -> Driver:
    """Request a has these tokens from a path, and was submitted to a replica as attempt 2."""
    driver = Driver(path(1, 2))
    driver.admit("a")
    for index in tokens:
        driver.give("a", 1, index)
    commands = driver.publish(MOVING, replica(3))
    assert sent(commands) == [("a", "replica-3", 2)]
    assert withdrawn(commands) == [], "the target has not accepted it yet"
    return driver


def withdrawn(commands: list[Command]) -> list[tuple[str, int]]:
    return [(c.node, c.cancel.attempt) for c in commands if isinstance(c, Withdraw)]


def emitted(commands: list[Command]) -> list[Emit]:
    return [command for command in commands if isinstance(command, Emit)]
