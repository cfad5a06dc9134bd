"""The registry's copies in memory, second by second."""

import msgspec

from services.registry.core.copies_view import copies_view
from services.registry.core.kept import CopyOrdered, Keeping
from services.registry.core.pool import DURABLE, CopyDropped, Pool
from shared.ids import Generation, ModelId, NodeId
from shared.layout import PAGE
from shared.messages.copies import Leave, ModelCopies
from shared.messages.pool import Holding, NodeInfo, Tier
from tests.unit.registry.builders import MODEL, OTHER, holding, info, record, status

WHOLE = (0, 1, 2, 3)
SIZE = PAGE
"""What a model takes in a host cache."""


class Nodes:
    """A pool whose nodes report every second."""

    def __init__(self, *names: str, room: int = 2 * SIZE, copies: int = 1) -> None:
        self.pool = Pool(DURABLE, Keeping(copies=copies, after_s=0.0))
        self.now, self.seq = 0.0, 0
        self.wall_ns = 0
        self.causes: list[tuple[str, str, str]] = []
        """(model, node, cause) of each copy in memory that was ordered or dropped."""
        self.infos: dict[str, NodeInfo] = {}
        self.held: dict[str, list[Holding]] = {}
        for name in names:
            self.join(name, room)
        self.pool.start(self.now)

    def join(self, name: str, room: int) -> None:
        self.infos[name] = msgspec.structs.replace(
            info(name), host=f"machine-{name}", host_bytes=room
        )
        self.held[name] = []
        self.pool.lease_put(self.infos[name], self.now)

    def leave(self, name: str) -> None:
        del self.infos[name], self.held[name]
        self.pool.lease_dropped(NodeId(name), self.now)

    def publish(self, model: str = MODEL, name: str = "llama") -> None:
        self.pool.catalog.put(record(name, model))

    def holds(self, name: str, tier: Tier, model: str = MODEL) -> None:
        self.held[name].append(holding(tier, *WHOLE, model_id=ModelId(model)))

    def lacks(self, name: str, tier: Tier, model: str = MODEL) -> None:
        self.held[name].remove(holding(tier, *WHOLE, model_id=ModelId(model)))

    def tick(self, seconds: float = 1.0) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """(copies in memory ordered, copies dropped) within this time."""
        made: list[tuple[str, str]] = []
        dropped: list[tuple[str, str]] = []
        for _ in range(round(seconds)):
            self.now += 1.0
            self.seq += 1
            for name, each in self.infos.items():
                self.pool.lease_put(each, self.now)
                cached = sum(h.tier is Tier.CACHE for h in self.held[name])
                said = msgspec.structs.replace(
                    status(name, *self.held[name], seq=self.seq),
                    host_free=each.host_bytes - cached * SIZE,
                )
                self.pool.status(said, self.now)
            for effect in self.pool.tick(self.now, self.wall_ns):
                if isinstance(effect, CopyOrdered) and effect.tier is Tier.CACHE:
                    made.append((effect.model_id, effect.info.node))
                    self.sources = [s.info.node for s in effect.sources]
                    self.causes.append((effect.model_id, effect.info.node, effect.cause))
                if isinstance(effect, CopyDropped):
                    dropped.append((effect.model_id, effect.info.node))
                    self.why = effect.why
                    self.causes.append((effect.model_id, effect.info.node, effect.cause))
        return made, dropped

    def view(self) -> ModelCopies:
        return copies_view(self.pool).models[0]


def test_an_idle_model_gets_one_copy_in_memory() -> None:
    up = Nodes("a", "b")
    up.publish()
    up.holds("a", Tier.DISK)
    made, _ = up.tick()
    assert made == [(MODEL, "a")]
    assert up.sources == ["a"], "its own disk has all, so that no link is used"
    assert "0 of 1 copies in memory" in up.view().shortfall
    up.holds("a", Tier.CACHE)
    assert up.tick(5) == ([], [])
    assert "in memory" not in up.view().shortfall
    assert up.view().host == ("a",)


def test_a_copy_that_is_in_use_or_sleeps_in_an_arena_counts() -> None:
    for tier in (Tier.GPU, Tier.HOST):
        up = Nodes("a", "b")
        up.publish()
        up.holds("a", Tier.DISK)
        up.holds("b", tier)
        assert up.tick(3) == ([], [])


def test_parts_that_together_make_a_copy_count() -> None:
    up = Nodes("a", "b", "c")
    up.publish()
    up.holds("a", Tier.DISK)
    up.held["b"].append(holding(Tier.GPU, 0, 1))
    made, _ = up.tick(3)
    assert made == [(MODEL, "a")], "half of the model is no copy"
    up = Nodes("a", "b", "c")
    up.publish()
    up.holds("a", Tier.DISK)
    for tier in (Tier.GPU, Tier.HOST):
        up.held["b"], up.held["c"] = [holding(tier, 0, 1)], [holding(tier, 2, 3)]
        assert up.tick(3) == ([], [])
        assert up.view().together == ("b", "c")
        assert "in memory" not in up.view().shortfall
    up.leave("b")
    made, _ = up.tick(1)
    assert made == [(MODEL, "a")]
    assert up.view().together == ()


def test_the_copy_of_a_lost_node_is_made_again_at_once() -> None:
    up = Nodes("a", "b", "c")
    up.publish()
    up.holds("a", Tier.DISK)
    up.holds("b", Tier.CACHE)
    up.tick(3)
    up.leave("b")
    made, _ = up.tick(1)
    assert made == [(MODEL, "a")]


def test_without_host_caches_nothing_is_ordered_and_nothing_is_lacking() -> None:
    up = Nodes("a", "b", room=0)
    up.publish()
    up.holds("a", Tier.DISK)
    assert up.tick(3) == ([], [])
    assert "in memory" not in up.view().shortfall


def test_more_copies_are_kept_by_policy_each_on_a_machine_of_its_own() -> None:
    up = Nodes("a", "b", "c", copies=2)
    up.publish()
    up.holds("a", Tier.DISK)
    made, _ = up.tick()
    assert sorted(node for _, node in made) == ["a", "b"]
    up = Nodes("a", "b", "c")
    up.pool.catalog.put(msgspec.structs.replace(record(), warm=2))
    up.holds("a", Tier.DISK)
    up.holds("b", Tier.GPU)
    made, _ = up.tick()
    assert sorted(node for _, node in made) == ["a", "c"], "warm copies are beside what serves"


def test_where_memory_is_short_the_model_that_is_used_more_is_kept() -> None:
    """The other's only copy goes for it, and the reason is told in numbers."""
    up = Nodes("a", room=SIZE)
    up.publish()
    up.publish(OTHER, "other")
    up.holds("a", Tier.DISK)
    up.holds("a", Tier.DISK, OTHER)
    up.holds("a", Tier.CACHE, OTHER)
    assert up.tick(3) == ([], []), "nothing is known of either: what is there stays"
    up.holds("a", Tier.GPU)
    assert up.tick(30) == ([], []), "it is in memory"
    up.lacks("a", Tier.GPU)
    made, dropped = up.tick()
    assert (made, dropped) == ([], [(OTHER, "a")])
    assert up.why.startswith("makes room for llama: ")
    assert " MB, whose loss is expected to cost 0.000 s" in up.why
    assert any(up.why in told.text for told in up.pool.story.of(OTHER))
    up.lacks("a", Tier.CACHE, OTHER)
    made, dropped = up.tick()
    assert (made, dropped) == ([(MODEL, "a")], [])


def test_a_copy_that_sleeps_in_an_arena_gets_room_in_its_nodes_cache() -> None:
    up = Nodes("a", "b", room=SIZE)
    up.publish()
    up.publish(OTHER, "other")
    up.holds("a", Tier.DISK)
    up.holds("b", Tier.DISK, OTHER)
    up.holds("a", Tier.CACHE, OTHER)
    up.holds("b", Tier.CACHE, OTHER)
    up.holds("a", Tier.HOST)
    assert up.tick() == ([], [(OTHER, "a")]), "the other has a second copy"


def test_a_copy_beside_another_goes_before_the_only_one_of_a_model_that_is_used_less() -> None:
    """Node c's arena has a copy of the other model, and a fast link."""
    up = Nodes("a", "b", room=SIZE)
    up.join("c", room=0)
    up.infos["c"] = msgspec.structs.replace(up.infos["c"], link_bytes_per_s=10**11)
    third = ModelId("th1rd")
    for model, name in ((MODEL, "llama"), (OTHER, "other"), (third, "third")):
        up.publish(model, name)
        up.holds("c", Tier.DISK, model)
    up.holds("a", Tier.CACHE, third)
    up.holds("b", Tier.CACHE, OTHER)
    for model, seconds in ((third, 10), (OTHER, 20), (MODEL, 60)):
        up.holds("c", Tier.GPU, model)
        up.tick(seconds)
        up.lacks("c", Tier.GPU, model)
        if model is OTHER:
            up.holds("c", Tier.HOST, OTHER)
    assert up.tick() == ([], [(OTHER, "b")])


def test_not_all_copies_of_a_model_go_at_once() -> None:
    """Two other models sleep in the arenas beside its copies, and each wants the room of one."""
    up = Nodes("a", "b", "c", room=SIZE)
    third = ModelId("th1rd")
    for model, name in ((MODEL, "llama"), (OTHER, "other"), (third, "third")):
        up.publish(model, name)
    for node, model in (("a", MODEL), ("b", third)):
        up.holds(node, Tier.CACHE, OTHER)
        up.holds(node, Tier.HOST, model)
        up.holds("c", Tier.DISK, model)
    _, dropped = up.tick()
    assert dropped == [(OTHER, "a")]


def test_the_only_copy_of_a_model_that_no_disk_has_stays() -> None:
    up = Nodes("a", room=SIZE)
    up.publish()
    up.publish(OTHER, "other")
    up.holds("a", Tier.DISK)
    up.holds("a", Tier.CACHE, OTHER)
    up.holds("a", Tier.GPU)
    up.tick(30)
    up.lacks("a", Tier.GPU)
    assert up.tick(30) == ([], [])


def test_a_node_that_is_about_to_end_hands_over_the_only_copy_in_memory() -> None:
    up = Nodes("a", "b")
    up.publish()
    up.holds("a", Tier.DISK)
    up.holds("b", Tier.DISK)
    up.holds("b", Tier.CACHE)
    up.tick(3)
    assert up.pool.leave(Leave(node=NodeId("b"), generation=Generation(1)), up.now, 0)[0] == (
        MODEL,
    )
    made, _ = up.tick()
    assert made == [(MODEL, "a")]
    up.holds("a", Tier.CACHE)
    up.tick()
    assert up.pool.leave(Leave(node=NodeId("b"), generation=Generation(1)), up.now, 0)[0] == ()


def test_a_copy_and_what_gives_way_for_it_name_what_made_the_copy_needed() -> None:
    up = Nodes("a", "b", "c", room=SIZE)
    up.publish()
    up.publish(OTHER, "other")
    for node in ("a", "c"):
        up.holds(node, Tier.DISK)
        up.holds(node, Tier.DISK, OTHER)
        up.holds(node, Tier.CACHE, OTHER)
    up.holds("b", Tier.CACHE)
    assert up.tick(3) == ([], [])
    up.leave("b")
    assert up.tick() == ([], [(OTHER, "a")])
    assert up.causes == [(OTHER, "a", "b")], "the node that went"
    assert "b" in [told.cause for told in up.pool.story.of(OTHER)]
    up.lacks("a", Tier.CACHE, OTHER)
    assert up.tick() == ([(MODEL, "a")], [])
    assert up.causes[1:] == [(MODEL, "a", "b")]


def test_a_warm_copy_is_caused_by_the_schedule_that_asks_for_it() -> None:
    up = Nodes("a", "b")
    window = msgspec.structs.replace(record(), schedule="daily 01:00-02:00 warm=2")
    up.pool.model_put(window, "model_set")
    up.holds("a", Tier.DISK)
    up.holds("a", Tier.CACHE)
    assert up.tick(2) == ([], [])
    up.wall_ns = 3600 * 10**9
    assert up.tick() == ([(MODEL, "b")], [])
    assert up.causes == [(MODEL, "b", "schedule")]
