"""Whatever happens to nodes and events, in whatever order, the pool's invariants hold."""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.registry.core.leases import LEASELESS_S, SILENCE_S
from services.registry.core.pool import Effect, Pool, ReservationEnded, ReservationMade
from services.registry.core.reservations import Reservation
from shared.ids import EventId, Generation, NodeId
from shared.messages.pool import (
    Holding,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeStatus,
    Tier,
    Unreserve,
)
from tests.support.amounts import examples
from tests.unit.registry.builders import MODEL, info, record, reserve, status

NODES = st.sampled_from([NodeId("a"), NodeId("b"), NodeId("c")])
EVENTS = st.sampled_from(["ev-1", "ev-2", "ev-3"])
BLOCKS = 4
HOLDINGS = st.lists(
    st.builds(
        lambda tier, blocks: Holding(MODEL, tier, tuple(sorted(blocks))),
        st.sampled_from(Tier),
        st.sets(st.integers(0, BLOCKS)),  # one of them beyond the model's blocks
    ),
    max_size=3,
)


class Cluster(RuleBasedStateMachine):
    """A model of what observers and the store know, kept by the effects alone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = Pool()
        self.pool.catalog.put(record(n_blocks=BLOCKS))
        self.generation = dict.fromkeys(["a", "b", "c"], 1)
        self.seq: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.newest: dict[tuple[str, int], NodeStatus] = {}
        self.announced: dict[NodeId, NodeInfo] = {}
        self.over: set[tuple[NodeId, Generation]] = set()
        self.stored: dict[NodeId, Reservation] = {}

    def follow(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case NodeJoined(info=joined):
                    known = self.announced.get(joined.node)
                    assert known is None or known.generation == joined.generation
                    assert (joined.node, joined.generation) not in self.over
                    self.announced[joined.node] = joined
                case NodeGone(node=node, generation=generation):
                    self.over.add((node, generation))
                    if node in self.announced and self.announced[node].generation == generation:
                        del self.announced[node]
                case ReservationMade(reservation=made):
                    assert made.node not in self.stored, "a node was reserved twice"
                    self.stored[made.node] = made
                case ReservationEnded(reservation=ended):
                    assert self.stored.pop(ended.node) == ended

    @rule(seconds=st.sampled_from([0.1, 1.0, SILENCE_S, LEASELESS_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.follow(self.pool.tick(self.now))
        for node, generation in list(self.newest):  # forgotten: no lease for a long time
            if self.pool.holdings.of(info(node, generation)) is None:
                del self.newest[node, generation]

    @rule(node=NODES)
    def renew(self, node: NodeId) -> None:
        self.follow(self.pool.lease_put(info(node, self.generation[node]), self.now))

    @rule(node=NODES)
    def restart_node(self, node: NodeId) -> None:
        self.generation[node] += 1
        self.renew(node)

    @rule(node=NODES, back=st.integers(1, 2))
    def ghost(self, node: NodeId, back: int) -> None:
        """An older process of the node renews: it was stopped for a while."""
        generation = max(1, self.generation[node] - back)
        self.follow(self.pool.lease_put(info(node, generation), self.now))

    @rule(node=NODES)
    def lease_goes(self, node: NodeId) -> None:
        self.follow(self.pool.lease_dropped(node, self.now))

    @rule(nodes=st.sets(NODES))
    def watch_begins_anew(self, nodes: set[NodeId]) -> None:
        self.follow(self.pool.leases_are(nodes, self.now))

    @rule(node=NODES, holdings=HOLDINGS, free=st.sampled_from([0, 400, 1000]))
    def report(self, node: NodeId, holdings: list[Holding], free: int) -> None:
        generation = self.generation[node]
        self.seq[node, generation] += 1
        said = status(
            node, *holdings, generation=generation, seq=self.seq[node, generation], free=free
        )
        self.newest[node, generation] = said
        self.follow(self.pool.status(said, self.now))

    @rule(node=NODES, holdings=HOLDINGS, back=st.integers(0, 2), older=st.booleans())
    def late_report(self, node: NodeId, holdings: list[Holding], back: int, older: bool) -> None:
        generation = max(1, self.generation[node] - older)
        seq = self.seq[node, generation] - back
        if (node, generation) in self.newest:
            said = status(node, *holdings, generation=generation, seq=seq)
            self.follow(self.pool.status(said, self.now))

    @rule(event=EVENTS, count=st.integers(0, 3), exclude=st.sets(NODES, max_size=2))
    def reserve(self, event: str, count: int, exclude: set[NodeId]) -> None:
        request = reserve(count, *exclude, event=event)
        targets, effects = self.pool.reserve(request)
        self.follow(effects)
        assert len(targets) <= count
        infos = [target.info for target in targets]
        assert len({target.node for target in infos}) == len(infos)
        for target in infos:
            assert target.node not in exclude
            assert self.announced[target.node] == target
            assert self.stored[target.node].event == event
        again, effects = self.pool.reserve(request)
        assert ([target.info for target in again], effects) == (infos, [])

    @rule(event=EVENTS, nodes=st.sets(NODES))
    def unreserve(self, event: str, nodes: set[NodeId]) -> None:
        others = {n: r for n, r in self.stored.items() if r.event != event}
        self.follow(self.pool.unreserve(Unreserve(event=EventId(event), nodes=tuple(nodes))))
        assert others.items() <= self.stored.items()
        left = {n for n, r in self.stored.items() if r.event == event}
        assert not left & nodes
        assert nodes or not left

    @precondition(lambda self: self.stored or self.announced)
    @rule()
    def restart_registry(self) -> None:
        pool = Pool()
        pool.catalog.put(record(n_blocks=BLOCKS))
        pool.restore(self.announced.values(), self.stored.values(), self.now)
        self.pool = pool
        self.over = set()  # the older process's memory of them is gone
        self.newest = {}

    @invariant()
    def its_parts_agree(self) -> None:
        self.pool.validate()

    @invariant()
    def observers_know_the_nodes(self) -> None:
        assert {i.node: i for i in self.pool.leases.present} == self.announced

    @invariant()
    def the_store_knows_the_reservations(self) -> None:
        assert {r.node: r for r in self.pool.reservations.all} == self.stored

    @invariant()
    def reservations_are_of_nodes_that_live(self) -> None:
        for held in self.stored.values():
            assert self.announced[held.node].generation == held.generation

    @invariant()
    def sources_are_all_alive_and_say_the_newest(self) -> None:
        found = self.pool.sources(MODEL)
        assert {(s.info.node, s.tier) for s in found} == {
            (node.node, holding.tier)
            for node in self.pool.leases.standing
            if (said := self.newest.get((node.node, node.generation)))
            for holding in said.holdings
            if set(holding.blocks) & set(range(BLOCKS))
        }
        for source in found:
            node = source.info
            assert self.announced[node.node] == node
            said = self.newest[node.node, node.generation]
            held = {b for h in said.holdings if h.tier is source.tier for b in h.blocks}
            assert list(source.blocks) == sorted(held & set(range(BLOCKS)))
            assert source.complete == (held >= set(range(BLOCKS)))

    @invariant()
    def copies_agree_with_sources(self) -> None:
        copies = self.pool.copies(MODEL)
        held = {block for source in self.pool.sources(MODEL) for block in source.blocks}
        assert not held & set(copies.missing)
        assert set(copies.memory) <= set(copies.disk)
        whole = {s.info.node for s in self.pool.sources(MODEL) if s.complete}
        assert whole <= set(copies.disk)


Cluster.TestCase.settings = settings(
    max_examples=examples(50), stateful_step_count=40, deadline=None
)
TestCluster = Cluster.TestCase
