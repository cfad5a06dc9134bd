"""One account of slots: what gateways think is free, and what leaders take, come to the same.

Gateways' cores and nodes' schedulers run with the same slots (`tests/support/coupled.py`).
Questions and answers are lost, late and in any order; tokens are lost and repeated; instances come,
move and go. At every moment each client has the true tokens, each once. As soon as nothing is under
way, no request waits, in a gateway or on an instance that moves, while an instance that its gateway
knows could begin it. And no node runs anything that no gateway wants.
"""

from itertools import count

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.gateway.core.breaker import REFUSED_S
from services.gateway.core.requests import Request
from shared.ids import NodeId
from shared.messages.instances import Instance, InstanceState
from shared.slots import Account, weight
from tests.support.amounts import examples
from tests.support.coupled import BLOCKS, TIMEOUT_S, Gateway, Pool, instance

NODES, SLOTS = 4, 2
PATHS = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 1, 2, 3))
PLACES = ((0,), (1,), (2,), (3,), *PATHS)
PICK = st.integers(0, 1000)
SWEEPS = 4
"""So many take a token over every path. If nodes ran less before a gateway asks, whatever is on a
path would look stuck."""


def shares(path: Instance, replica: Instance) -> bool:
    """Whether the replica's node runs the path's prompts anyway: they stay till their first
    token."""
    return replica.is_replica and replica.leader in {stage.node for stage in path.stages[:2]}


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names = count(1)

    @initialize(gateways=st.integers(1, 2))
    def begin(self, gateways: int) -> None:
        self.pool = Pool(NODES, SLOTS, gateways)
        self.pool.publish(instance(0))

    # --- what happens --------------------------------------------------------

    @rule(
        gateway=PICK,
        sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=4),
    )
    def admit(self, gateway: int, sizes: list[tuple[int, int]]) -> None:
        """Requests with prompts and answers of these lengths."""
        gateways = self.pool.gateways
        for prompt, tokens in sizes:
            gateways[gateway % len(gateways)].admit(f"r{next(self.names)}", prompt, tokens)

    def publish(self, instances: list[Instance]) -> None:
        """Publishes the instances. If two have the same id, the later one counts."""
        self.pool.publish(*{each.id: each for each in instances}.values())

    @rule(nodes=st.sampled_from(PLACES), slots=st.integers(1, 3))
    def appear(self, nodes: tuple[int, ...], slots: int) -> None:
        new = instance(*nodes, slots=SLOTS if len(nodes) == 1 else slots)
        self.publish([*self.pool.instances, new])

    @rule(number=PICK, state=st.sampled_from([InstanceState.MOVING, *InstanceState]))
    def change(self, number: int, state: InstanceState) -> None:
        """An instance moves, drains, or serves again."""
        if found := list(self.pool.instances):
            number %= len(found)
            found[number] = msgspec.structs.replace(found[number], state=state)
            self.publish(found)

    @rule(number=PICK)
    def vanish(self, number: int) -> None:
        if found := list(self.pool.instances):
            del found[number % len(found)]
            self.publish(found)

    @rule(nodes=st.sampled_from(PATHS), slots=st.integers(1, 3), complete=PICK)
    def switch(self, nodes: tuple[int, ...], slots: int, complete: int) -> None:
        """A path has served; now one of its nodes, or another, is complete, and the path moves."""
        before = [*self.pool.instances, instance(*nodes, slots=slots)]
        self.publish(before)
        self.pool.deliver_all()
        moving = [
            each if each.is_replica else msgspec.structs.replace(each, state=InstanceState.MOVING)
            for each in before
        ]
        self.publish([*moving, instance(complete % NODES)])

    @rule(
        happens=st.lists(
            st.tuples(
                st.sampled_from(["submit", "reply", "cancel", "tokens", "step", "step"]),
                PICK,
                st.sampled_from(["", "", "", "", "question", "answer", "repeat"]),
            ),
            max_size=12,
        )
    )
    def go_on(self, happens: list[tuple[str, int, str]]) -> None:
        """Messages arrive in any order, or do not; nodes run."""
        pool = self.pool
        for what, number, fate in happens:
            match what:
                case "submit" if pool.submits:
                    lose = "" if fate == "repeat" else fate
                    pool.submit(number % len(pool.submits), lose=lose)
                case "reply" if pool.replies:
                    pool.reply(number % len(pool.replies))
                case "cancel" if pool.cancels:
                    pool.cancel(number % len(pool.cancels), lose=fate == "question")
                case "tokens" if pool.tokens:
                    number %= len(pool.tokens)
                    pool.deliver(number, lose=fate == "answer", repeat=fate == "repeat")
                case "step":
                    pool.step(NodeId(f"n{number % NODES}"))

    @rule(seconds=st.sampled_from([0.01, 0.06, 0.5, 2.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.pool.wait(seconds)

    @rule()
    def settle(self) -> None:
        """Everything under way arrives, nodes run and say what they have, pauses run out, instances
        are tried again, and suspects, who run one after the other, are cleared."""
        quiet, before = 0, self.suspects()
        while quiet < (16 if before else 4):  # a prompt takes several steps
            now = self.suspects()
            quiet, before = quiet + 1 if now == before else 0, now
            self.sweep()
            self.pool.wait(2 * REFUSED_S)
        for _ in range(4):
            for _ in range(SWEEPS):
                self.sweep()
            self.pool.wait(TIMEOUT_S)
        self.pool.deliver_all()
        self.check_nobody_waits_in_vain()
        self.check_nodes_run_what_is_wanted()

    def sweep(self) -> None:
        for name in self.pool.nodes:
            self.pool.step(name)
        self.pool.deliver_all()

    def suspects(self) -> dict[str, int]:
        """Each with the number of its tokens."""
        clients = [c for gateway in self.pool.gateways for c in gateway.clients.values()]
        suspects = (c.request for c in clients if c.open and c.request.suspect)
        return {request.id: len(request.tokens) for request in suspects}

    # --- what holds ----------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        """`Gateway.do` checks each token; here: that no request ended with an error."""
        for gateway in self.pool.gateways:
            for client in gateway.clients.values():
                assert client.error is None
                assert len(client.tokens) <= client.request.max_tokens

    @invariant()
    def nodes_take_no_more_than_their_slots(self) -> None:
        for name in self.pool.nodes:
            alone = [s for s in self.pool.led(name) if len(s.path.stages) == 1]
            assert len({s.submit.request for s in alone}) <= SLOTS

    def check_nobody_waits_in_vain(self) -> None:
        serving = [i for i in self.pool.instances if i.state is InstanceState.SERVING]
        replicas = [i for i in serving if i.is_replica]
        moving = {i.id: i for i in self.pool.instances if i.state is InstanceState.MOVING}
        for gateway in self.pool.gateways:
            for client in gateway.open:
                request = client.request
                waits = not request.running
                path = moving.get(request.instance) if request.instance else None
                leaves = path is not None and request.move is None
                better = serving if waits else replicas or serving if leaves else []
                if path and not request.has_token:
                    better = [each for each in better if not shares(path, each)]
                free = [each.id for each in better if self.could_begin(gateway, request, each)]
                assert not free, f"{request.id} waits while {free} could begin it"
        for name, node in self.pool.nodes.items():
            self.pool.step(name)
            assert not node.waiting, "an attempt waits at its leader"

    def could_begin(self, gateway: Gateway, request: Request, place: Instance) -> bool:
        """Whether the gateway may send one more there, and the nodes really have room."""
        mine = [r.request for r in gateway.clients.values() if r.open]
        there = [r for r in mine if place.id in (r.instance, r.move and r.move.instance)]
        if len(there) >= place.slots or self.is_trying(place, request):
            return False
        for stage in place.stages:
            account = Account(SLOTS)
            for node in self.pool.nodes:
                for sequence in self.pool.led(node):
                    stages = sequence.path.stages
                    if sequence.submit.request == request.id and not request.running:
                        continue
                    for each in stages:
                        if each.node == stage.node:
                            account.add(len(stages), weight(stages, each, BLOCKS))
            if not account.has_room(len(place.stages), weight(place.stages, stage, BLOCKS)):
                return False
        return True

    def is_trying(self, place: Instance, request: Request) -> bool:
        """Whether a node of the place tries another request, which may kill nodes."""
        clients = [c for gateway in self.pool.gateways for c in gateway.open]
        nodes = {stage.node for stage in place.stages}
        tried = {c.request.id for c in clients if c.request.suspect} - {request.id}
        return any(
            sequence.submit.request in tried and nodes & {s.node for s in sequence.path.stages}
            for name in self.pool.nodes
            for sequence in self.pool.led(name)
        )

    def check_nodes_run_what_is_wanted(self) -> None:
        wanted = {
            (client.request.id, client.request.attempt)
            for gateway in self.pool.gateways
            for client in gateway.open
            if client.request.running
        }
        run = [
            (sequence.submit.request, sequence.submit.attempt)
            for name in self.pool.nodes
            for sequence in self.pool.led(name)
        ]
        assert len(set(run)) == len(run), "an attempt is run twice"
        assert set(run) <= wanted, "a node runs what nobody wants"

    def teardown(self) -> None:
        """With one sound instance everything that is left ends."""
        if not hasattr(self, "pool"):
            return
        self.pool.publish(instance(0))
        for _ in range(2000):
            if not any(client for gateway in self.pool.gateways for client in gateway.open):
                break
            for name in self.pool.nodes:
                self.pool.step(name)
            self.pool.deliver_all()
            self.pool.wait(1.0)
        for gateway in self.pool.gateways:
            for client in gateway.clients.values():
                assert client.finish == "length"
                assert len(client.tokens) == client.request.max_tokens


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
