"""Gateways' cores and nodes' schedulers, coupled by messages that the test delivers one by one.

Everything is pure and has one clock. Between gateways and nodes a message may be late, lost or
repeated, as on the bus; between the stages of a path it arrives at once. Each node has KV for
everything, so that slots alone decide who runs. Tokens depend on (request, index) only.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from services.gateway.core.commands import (
    AskWhetherAlive,
    AskWhoDied,
    Command,
    Emit,
    End,
    Send,
    Withdraw,
)
from services.gateway.core.dispatch import Dispatch
from services.gateway.core.ledger import Rules
from services.gateway.core.requests import Request
from services.node.core import microbatches
from services.node.core.batching import Batcher
from services.node.core.kv import Need
from services.node.core.kv_host import NoHostTier
from services.node.core.microbatches import Part
from services.node.core.sequences import Sequence
from shared.errors import BusTimeout, CapacityExceeded, LambdaScaleError
from shared.ids import NO_ADAPTER, GatewayId, InstanceId, ModelId, ModelName, NodeId, RequestId
from shared.messages.instances import Instance, InstanceSet, InstanceState, Stage
from shared.messages.serving import AttemptFailed, Cancel, Sampling, Scores, Submit, Token, Tokens

MODEL, NAME = ModelId("m0"), ModelName("m")
BLOCKS = 4
STEP_TOKENS = 8
"""Prompt tokens that a node takes in one sweep."""
TIMEOUT_S = 5.0
"""A gateway waits for an answer this long."""


def true_token(request: RequestId, index: int) -> int:
    return sum(request.encode()) * 7919 % 997 + index


def instance(*nodes: int, state: InstanceState = InstanceState.SERVING, slots: int = 2) -> Instance:
    """A replica on a node, or a path over several, led by the first."""
    share = BLOCKS // len(nodes)
    starts = [share * i for i in range(len(nodes))]
    stages = tuple(
        Stage(NodeId(f"n{node}"), f"mem://n{node}", start, stop)
        for node, start, stop in zip(nodes, starts, [*starts[1:], BLOCKS], strict=True)
    )
    name = "-".join(map(str, nodes))
    return Instance(
        id=InstanceId(name),
        stages=stages,
        state=state,
        capacity=1.0 / len(nodes),
        slots=slots,
        event=None,
    )


class AmpleKv(NoHostTier):
    kv_capacity = 1 << 30
    kv_used = 0

    def kv_share(self, model_id: ModelId) -> int:
        return self.kv_capacity

    def kv_parts(self, model_id: ModelId, start: int, stop: int) -> int:
        return 1

    def kv_free(self, model_id: ModelId, promised: Mapping[Need, int]) -> int:
        return self.kv_capacity - self.kv_used - sum(promised.values())

    def make_room(self, wanted: Mapping[ModelId, int]) -> None:
        """Models do not differ."""

    def keeps(self, model_id: ModelId, start: int = 0, stop: int = BLOCKS) -> bool:
        return True

    def adopt(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        return 0

    def position_bytes(self, model_id: ModelId) -> int:
        return 0

    def receive(
        self,
        model_id: ModelId,
        key: str,
        tokens: tuple[int, ...],
        limit: int,
        adapter: ModelId = NO_ADAPTER,
    ) -> int:
        raise CapacityExceeded("no KV is moved here")

    def receive_more(self, key: str, end: int) -> None:
        raise AssertionError("no KV is moved here")

    def received(self, key: str, tokens: tuple[int, ...]) -> None:
        raise AssertionError("no KV was moved here")


@dataclass
class Sent:
    """A Submit, on its way to a node or back."""

    gateway: "Gateway"
    node: NodeId
    submit: Submit
    at: float
    """When it was sent."""


@dataclass
class Client:
    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: LambdaScaleError | None = None

    @property
    def open(self) -> bool:
        return not self.finish and self.error is None


class Gateway:
    def __init__(self, pool: "Pool", name: str) -> None:
        self.name = GatewayId(name)
        self.clients: dict[RequestId, Client] = {}
        self._pool = pool
        self._drawn = 0.0
        rules = Rules(
            draw=self._draw,
            max_queue=1000,
            queue_timeout_s=1e9,
            stall_s=30.0,
            max_attempts=1000,
        )
        self.dispatch = Dispatch(rules)
        self.dispatch.take_id(self.name, 0.0)
        self.dispatch.add_model(NAME, MODEL)

    def _draw(self) -> float:
        self._drawn = (self._drawn + 0.381966) % 1.0
        return self._drawn

    @property
    def open(self) -> Iterator[Client]:
        return (client for client in self.clients.values() if client.open)

    def admit(self, name: str, prompt: int, max_tokens: int) -> None:
        request = Request(
            RequestId(name),
            MODEL,
            tuple(range(prompt)),
            max_tokens,
            (),
            Sampling(),
            self._pool.now,
        )
        self.clients[request.id] = Client(request)
        self.do(self.dispatch.admit([request], self._pool.now))

    def do(self, commands: Iterable[Command]) -> None:
        self.dispatch.validate()
        for command in commands:
            match command:
                case Send(node, submit):
                    self._pool.submits.append(Sent(self, node, submit, self._pool.now))
                case Withdraw(node, cancel):
                    self._pool.cancels.append((node, cancel))
                case Emit(request, token, finish):
                    client = self.clients[request]
                    assert client.open, "a token after the end"
                    assert token == true_token(request, len(client.tokens))
                    client.tokens.append(token)
                    client.finish = finish
                case AskWhoDied(model_id):
                    self.do(self.dispatch.on_found_dead(model_id, (), self._pool.now))
                case AskWhetherAlive(request, attempt):
                    alive = self.dispatch.on_judged(request, attempt, (), self._pool.now)
                    self.do(alive)
                case End(request, error):
                    self.clients[request].error = error


class Pool:
    """Nodes n0, n1, ..., of `slots` slots each, and gateways g0, g1, ..."""

    def __init__(self, nodes: int, slots: int, gateways: int = 1) -> None:
        self.now = 0.0
        self.slots = slots
        self.instances: tuple[Instance, ...] = ()
        self.submits: list[Sent] = []
        self.replies: list[tuple[Sent, LambdaScaleError | None]] = []
        self.silent: list[Sent] = []
        """Questions that no answer will come to."""
        self.cancels: list[tuple[NodeId, Cancel]] = []
        self.tokens: list[tuple[Gateway, Tokens]] = []
        self.nodes = {
            NodeId(f"n{i}"): Batcher(
                NodeId(f"n{i}"), slots=slots, step_tokens=STEP_TOKENS, kv=AmpleKv()
            )
            for i in range(nodes)
        }
        self.gateways = [Gateway(self, f"g{i}") for i in range(gateways)]
        self._revision = 0

    # --- what may happen -----------------------------------------------------

    def publish(self, *instances: Instance) -> None:
        """Every gateway learns the instances at once."""
        self.instances = instances
        self._revision += 1
        new = InstanceSet(
            name=NAME,
            model_id=MODEL,
            epoch=1,
            revision=self._revision,
            instances=instances,
            node_slots=dict.fromkeys(self.nodes, self.slots),
        )
        for gateway in self.gateways:
            gateway.do(gateway.dispatch.on_instances(new, self.now))

    def submit(self, number: int, *, lose: str = "") -> None:
        """Delivers a Submit. `lose`: the `question` or the `answer` does not arrive."""
        sent = self.submits.pop(number)
        node = self.nodes[sent.node]
        error: LambdaScaleError | None = None
        if lose != "question":
            try:
                commands = node.submit(sent.submit, n_blocks=BLOCKS, held=range(BLOCKS))
            except LambdaScaleError as refusal:
                error = refusal
            else:
                self._do(sent.node, commands)
        if lose:
            self.silent.append(sent)
        else:
            self.replies.append((sent, error))

    def reply(self, number: int) -> None:
        sent, error = self.replies.pop(number)
        self._answered(sent, error)

    def cancel(self, number: int, *, lose: bool = False) -> None:
        name, cancel = self.cancels.pop(number)
        if not lose:
            self._do(name, self.nodes[name].cancel(cancel))

    def deliver(self, number: int, *, lose: bool = False, repeat: bool = False) -> None:
        """Delivers a message of tokens."""
        gateway, message = self.tokens[number] if repeat else self.tokens.pop(number)
        if not lose:
            gateway.do(gateway.dispatch.on_tokens(message, self.now))

    def step(self, name: NodeId) -> None:
        """One sweep of a node. Parts that begin on it may go on at other nodes."""
        node = self.nodes[name]
        self._do(name, node.pull(()))
        for part in node.take():
            drawn = [self._drawn(part, i) for i in range(len(part.rows))]
            self._do(name, node.ran(part, drawn, None))

    def wait(self, seconds: float) -> None:
        """Time passes; questions without an answer time out."""
        self.now += seconds
        over = [sent for sent in self.silent if self.now - sent.at >= TIMEOUT_S]
        self.silent = [sent for sent in self.silent if sent not in over]
        for sent in over:
            self._answered(sent, BusTimeout("no answer"))
        for gateway in self.gateways:
            gateway.do(gateway.dispatch.on_tick(self.now))

    def deliver_all(self) -> None:
        """All that is under way arrives, in the usual order: tokens before answers that were given
        after them."""
        while self.tokens or self.cancels or self.submits or self.replies:
            if self.tokens:
                self.deliver(0)
            elif self.cancels:
                self.cancel(0)
            elif self.submits:
                self.submit(0)
            else:
                self.reply(0)

    def _answered(self, sent: Sent, error: LambdaScaleError | None) -> None:
        dispatch, submit = sent.gateway.dispatch, sent.submit
        if error is None:
            commands = dispatch.on_taken(submit.request, submit.attempt, self.now)
        else:
            commands = dispatch.on_not_taken(submit.request, submit.attempt, error, self.now)
        sent.gateway.do(commands)

    # --- nodes ---------------------------------------------------------------

    def led(self, name: NodeId) -> list[Sequence]:
        """The sequences that a node leads."""
        return list(self.nodes[name]._leader.led)

    def _do(self, name: NodeId, commands: Iterable[microbatches.Command]) -> None:
        """Delivers what is meant for other stages, and sends off what is meant for gateways."""
        todo = deque((name, command) for command in commands)
        emitted: dict[NodeId, list[microbatches.Emit]] = {}
        while todo:
            at, command = todo.popleft()
            self.nodes[at].validate()
            match command:
                case microbatches.Send(address, message):
                    other = NodeId(address.removeprefix("mem://"))
                    todo += [(other, each) for each in self.nodes[other].received(message)]
                case microbatches.Emit():
                    emitted.setdefault(at, []).append(command)
        for at, emits in emitted.items():
            self._publish(at, emits)

    def _drawn(self, part: Part, number: int) -> tuple[int, ...]:
        row = part.rows[number]
        if row.draw is None or part.stop < BLOCKS:
            return ()
        return (true_token(RequestId(row.sequence.split("#")[0]), row.draw.index),)

    def _publish(self, name: NodeId, emitted: Iterable[microbatches.Emit]) -> None:
        """One message for each gateway."""
        for gateway in self.gateways:
            said = [emit.what for emit in emitted if emit.gateway == gateway.name]
            message = Tokens(
                node=name,
                tokens=tuple(what for what in said if isinstance(what, Token)),
                scores=tuple(what for what in said if isinstance(what, Scores)),
                failed=tuple(what for what in said if isinstance(what, AttemptFailed)),
            )
            if said:
                self.tokens.append((gateway, message))
