"""Orders of copies: whatever nodes make of them, and however their reports and answers come (late,
lost, repeated, reordered), the registry stays sound. Once nodes behave, every model has its copies.
"""

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.registry.core.kept import CopyOrdered, Keeping, ModelSkipped
from services.registry.core.orders import ASKED_S, REFUSED_S, STALL_S
from services.registry.core.pool import CopyDropped, Effect, Pool
from shared.ids import ModelId, NodeId
from shared.messages.copies import Leave
from shared.messages.pool import CopyProgress, Holding, ModelRecord, NodeInfo, NodeStatus, Tier
from tests.support.amounts import examples
from tests.unit.registry.builders import MODEL, OTHER, info, record

AFTER_S = 20.0
NODES = ("a", "b", "c", "d")
RECORDS = {MODEL: record(), OTHER: record("other", OTHER)}
STEP = 20
"""Bytes of a copy that a node makes in a second."""
Place = tuple[ModelId, Tier]


@dataclass
class Node:
    """What is true of a node, whatever the registry has heard."""

    info: NodeInfo
    has: set[Place]
    alive: bool = True
    mute: bool = False
    """Its reports are lost."""
    stuck: bool = False
    """Its copies make no progress."""
    broken: bool = False
    """It refuses orders, and copies that it makes end with an error."""
    seq: int = 0
    making: dict[Place, CopyProgress] = field(default_factory=dict)

    def second(self) -> None:
        for place, each in list(self.making.items()):
            if self.broken and each.running:
                self.making[place] = msgspec.structs.replace(each, running=False, error="broken")
            elif each.running and not self.stuck:
                done = min(each.nbytes, each.done + STEP)
                self.making[place] = msgspec.structs.replace(each, done=done)
                if done == each.nbytes:
                    del self.making[place]
                    self.has.add(place)

    def status(self) -> NodeStatus:
        self.seq += 1
        return NodeStatus(
            node=self.info.node,
            generation=self.info.generation,
            seq=self.seq,
            arena_free=0,
            holdings=tuple(
                Holding(model, tier, (0, 1, 2, 3)) for model, tier in sorted(self.has, key=str)
            ),
            copying=tuple(self.making.values()),
            disk_bytes=10_000,
            disk_free=5000,
            host_free=10_000_000,
        )

    def take(self, order: CopyOrdered) -> bool:
        """Whether it accepts. An order that it has already changes nothing."""
        place = (order.model_id, order.tier)
        if not self.alive or order.info.generation != self.info.generation or self.broken:
            return False
        known = self.making.get(place)
        if place not in self.has and not (known and known.running):
            self.making[place] = CopyProgress(
                model_id=order.model_id, done=0, nbytes=400, tier=order.tier
            )
        return True

    def restart(self) -> None:
        generation = self.info.generation + 1
        self.info = msgspec.structs.replace(self.info, generation=generation)
        self.has = {place for place in self.has if place[1] is Tier.DISK}
        self.alive, self.seq, self.making = True, 0, {}


class Copies(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.nodes = {
            name: Node(
                msgspec.structs.replace(info(name), host=f"machine-{name}", host_bytes=10_000_000),
                {(MODEL, Tier.DISK), (OTHER, Tier.DISK)} if name == "a" else set(),
            )
            for name in NODES
        }
        self.orders: list[CopyOrdered] = []
        """Sent, and not thrown away: an order may come several times."""
        self.refusals: list[CopyOrdered] = []
        self.late: list[NodeStatus] = []
        self.ending: set[str] = set()
        """Nodes that have said so."""
        self.pool = self.new_pool()
        self.second()
        self.start()

    def new_pool(self) -> Pool:
        pool = Pool(Keeping(copies=2, after_s=AFTER_S), Keeping(copies=1, after_s=0.0))
        for known in RECORDS.values():
            pool.catalog.put(known)
        return pool

    def start(self) -> None:
        self.pool.start(self.now)

    def follow(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not isinstance(effect, ModelSkipped), effect
            if isinstance(effect, CopyOrdered):
                self.orders.append(effect)
            elif isinstance(effect, CopyDropped):
                node = self.nodes[effect.info.node]
                node.has.discard((effect.model_id, Tier.CACHE))

    def second(self) -> None:
        self.now += 1.0
        for node in self.nodes.values():
            node.second()
            if node.alive:
                self.follow(self.pool.lease_put(node.info, self.now))
                status = node.status()
                self.late = [*self.late, status][-8:]
                if not node.mute:
                    self.follow(self.pool.status(status, self.now))
        self.follow(self.pool.tick(self.now))

    @rule(seconds=st.sampled_from([1, 3, int(ASKED_S), int(STALL_S), int(REFUSED_S)]))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), again=st.booleans())
    def an_order_comes(self, data: st.DataObject, again: bool) -> None:
        order = data.draw(st.sampled_from(self.orders))
        self.deliver_to(order)
        if not again:
            self.orders.remove(order)

    @rule(seconds=st.sampled_from([1, 10]))
    def orders_come(self, seconds: int) -> None:
        """For a while, everything that is ordered comes at once."""
        for _ in range(seconds):
            self.deliver()
            self.second()

    @precondition(lambda self: self.orders)
    @rule(data=st.data())
    def an_order_is_lost(self, data: st.DataObject) -> None:
        self.orders.remove(data.draw(st.sampled_from(self.orders)))

    @precondition(lambda self: self.refusals)
    @rule(data=st.data())
    def a_refusal_comes(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.refusals))
        self.refusals.remove(order)
        self.pool.order_failed(order, "refused", self.now)

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def an_old_report_comes(self, data: st.DataObject) -> None:
        self.follow(self.pool.status(data.draw(st.sampled_from(self.late)), self.now))

    @rule(name=st.sampled_from(NODES), what=st.sampled_from(["mute", "stuck", "broken"]))
    def a_node_changes(self, name: str, what: str) -> None:
        setattr(self.nodes[name], what, not getattr(self.nodes[name], what))

    @rule(name=st.sampled_from(NODES))
    def a_node_ends(self, name: str) -> None:
        self.nodes[name].alive = False
        self.follow(self.pool.lease_dropped(NodeId(name), self.now))

    @rule(name=st.sampled_from(NODES))
    def a_node_restarts(self, name: str) -> None:
        self.nodes[name].restart()
        self.ending.discard(name)

    @rule(name=st.sampled_from(NODES))
    def a_node_is_about_to_end(self, name: str) -> None:
        node = self.nodes[name].info
        self.pool.leave(Leave(node=node.node, generation=node.generation), self.now, 0)
        self.ending.add(name)

    @rule()
    def the_registry_restarts(self) -> None:
        present = self.pool.leases.present
        self.pool = self.new_pool()
        self.pool.restore(present, (), self.now)
        self.second()
        self.start()

    @rule(of=st.sampled_from(sorted(RECORDS)))
    def a_model_goes_or_comes(self, of: ModelId) -> None:
        known = RECORDS[of]
        if self.pool.catalog.get(of) is None:
            self.pool.catalog.put(known)
        else:
            self.pool.catalog.remove(known.name)

    @invariant()
    def it_is_sound(self) -> None:
        self.pool.validate()

    def teardown(self) -> None:
        """Everything works again: every model that is on some disk comes to two."""
        for name, node in self.nodes.items():
            node.mute = node.stuck = node.broken = False
            if not node.alive or name in self.ending:
                node.restart()
            if name == "a":
                node.has |= {(model, Tier.DISK) for model in RECORDS}
        for known in RECORDS.values():
            self.pool.catalog.put(known)
        for _ in range(int(AFTER_S + 2 * (REFUSED_S + STALL_S + ASKED_S))):
            self.deliver()
            self.second()
        for known in RECORDS.values():
            assert self.whole(known, Tier.DISK) >= 2, known.name
            assert self.whole(known, Tier.CACHE) >= 1, known.name

    def deliver(self) -> None:
        for order in self.orders:
            self.deliver_to(order)
        self.orders = []

    def deliver_to(self, order: CopyOrdered) -> None:
        if not self.nodes[order.info.node].take(order):
            self.refusals.append(order)

    def whole(self, known: ModelRecord, tier: Tier) -> int:
        return sum((known.model_id, tier) in node.has for node in self.nodes.values())


Copies.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=30, deadline=None
)
TestCopies = Copies.TestCase
