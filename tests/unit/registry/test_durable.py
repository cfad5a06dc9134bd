"""The registry's orders of durable copies, second by second."""

import msgspec
import pytest

from services.registry.core.copies_view import copies_view
from services.registry.core.durable import DurableCopies
from services.registry.core.kept import (
    LINK_SHARE,
    UNKNOWN_RATE,
    CopyOrdered,
    Keeping,
    ModelSkipped,
)
from services.registry.core.orders import ASKED_S, REFUSED_S, STALL_S
from services.registry.core.pool import Effect, Pool
from shared.ids import Generation, ModelId, NodeId
from shared.messages.copies import Leave, ModelCopies
from shared.messages.pool import CopyProgress, Duty, ModelRecord, NodeInfo, SetDuty, Tier
from tests.unit.registry.builders import MODEL, OTHER, holding, info, record, status

WHOLE = holding(Tier.DISK, 0, 1, 2, 3)
AFTER_S = 60.0


class Nodes:
    """A pool with nodes that report every second."""

    def __init__(self, *names: str, settings: Keeping | None = None) -> None:
        self.pool = Pool(settings or Keeping(copies=2, after_s=AFTER_S))
        self.now = 0.0
        self.seq = 0
        self.infos: dict[str, NodeInfo] = {}
        self.stored: set[str] = set()
        self.held = [WHOLE]
        self.copying: dict[str, CopyProgress] = {}
        for name in names:
            self.join(name)

    def start(self, *stored: str) -> "Nodes":
        """The registry has started, and the model is imported."""
        self.stored = set(stored)
        self.report()
        self.pool.durable.start(self.now)
        self.pool.model_put(record(), "model_add")
        return self

    def join(self, name: str, generation: int = 1, link: int = 0) -> None:
        self.infos[name] = msgspec.structs.replace(
            info(name, generation), host=f"machine-{name}", link_bytes_per_s=link
        )
        self.pool.lease_put(self.infos[name], self.now)

    def leave(self, name: str) -> None:
        del self.infos[name]
        self.pool.lease_dropped(NodeId(name), self.now)

    def report(self) -> None:
        self.seq += 1
        for name, each in self.infos.items():
            self.pool.lease_put(each, self.now)
            said = status(
                name,
                *(self.held if name in self.stored else []),
                generation=each.generation,
                seq=self.seq,
            )
            copying = (self.copying[name],) if name in self.copying else ()
            said = msgspec.structs.replace(said, disk_bytes=10_000, disk_free=5000, copying=copying)
            self.pool.status(said, self.now)

    def copies(self, name: str, done: int, *, running: bool = True, error: str = "") -> None:
        self.copying[name] = CopyProgress(
            model_id=MODEL, done=done, nbytes=400, running=running, error=error
        )

    def tick(self, seconds: float = 1.0) -> list[CopyOrdered]:
        """What is ordered within this time."""
        effects = [effect for _ in range(round(seconds)) for effect in self.second()]
        return [effect for effect in effects if isinstance(effect, CopyOrdered)]

    def second(self) -> list[Effect]:
        self.now += 1.0
        self.report()
        effects = self.pool.tick(self.now)
        self.pool.validate()
        return effects

    def view(self) -> ModelCopies:
        (model,) = copies_view(self.pool).models
        return model


def targets(orders: list[CopyOrdered]) -> list[str]:
    return [order.info.node for order in orders]


def test_a_second_copy_is_ordered_once_and_made() -> None:
    up = Nodes("a", "b", "c").start("a")
    (order,) = up.tick()
    assert order.info.node == "b"
    assert [source.info.node for source in order.sources] == ["a"]
    assert order.bytes_per_s == UNKNOWN_RATE
    assert not up.tick(3)
    up.copies("b", 100)
    assert not up.tick(3)
    assert up.view().shortfall == "1 of 2 durable copies: the next is at 25% on b"
    del up.copying["b"]
    up.stored.add("b")
    assert not up.tick(30)
    assert up.view().shortfall == ""
    assert [copy.machine for copy in up.view().durable] == ["machine-a", "machine-b"]


def test_what_comes_next_is_right_before_the_registry_looks_for_a_place() -> None:
    alone = Nodes("a").start("a")
    assert alone.view().shortfall == "1 of 2 durable copies: there is no other machine"
    two = Nodes("a", "b").start("a")
    assert two.view().shortfall == "1 of 2 durable copies: the next is about to be made"


def test_a_copy_takes_a_part_of_the_slower_link() -> None:
    up = Nodes("a", "b")
    up.join("a", link=1000)
    up.join("b", link=800)
    (order,) = up.start("a").tick()
    assert order.bytes_per_s == 200


def test_nothing_is_ordered_before_nodes_have_reported() -> None:
    assert not Nodes("a", "b").tick(5)


def test_a_node_that_comes_back_in_time_moves_nothing() -> None:
    up = Nodes("a", "b", "c").start("a", "b")
    up.leave("b")
    assert not up.tick(AFTER_S - 2)
    assert up.view().shortfall == "1 of 2 durable copies: b is waited for, which is gone"
    up.join("b", generation=2)
    assert not up.tick(AFTER_S)


def test_a_copy_that_does_not_come_back_is_made_anew() -> None:
    up = Nodes("a", "b", "c").start("a", "b")
    up.leave("b")
    assert targets(up.tick(AFTER_S + 1)) == ["c"]


def test_the_last_copy_is_not_waited_for_if_memory_has_the_model() -> None:
    up = Nodes("a", "b", "c").start("a")
    said = status("b", holding(Tier.GPU, 0, 1, 2, 3), seq=99)
    up.leave("a")
    up.pool.status(msgspec.structs.replace(said, disk_bytes=10_000, disk_free=5000), up.now)
    up.infos.pop("b")  # it says no more than that
    up.pool.leases.hear(up.now)
    assert targets(up.tick()) == ["c"]


def test_a_copy_whose_node_restarts_goes_on_there() -> None:
    up = Nodes("a", "b", "c").start("a")
    up.tick()
    up.copies("b", 200)
    up.tick()
    up.leave("b")
    assert not up.tick(5)
    up.join("b", generation=2)
    up.copies("b", 200, running=False)
    assert targets(up.tick(2)) == ["b"]


def test_a_refusal_brings_the_copy_to_another_node_and_is_forgotten_in_time() -> None:
    up = Nodes("a", "b").start("a")
    (order,) = up.tick()
    up.pool.durable.failed(order, "no room", up.now)
    assert not up.tick()
    assert up.view().shortfall == "1 of 2 durable copies: b failed to make it: no room"
    up.join("c")
    assert targets(up.tick()) == ["c"]
    up.leave("c")
    assert targets(up.tick(REFUSED_S)) == ["b"]


def test_a_late_refusal_of_an_older_order_changes_nothing() -> None:
    up = Nodes("a", "b").start("a")
    (order,) = up.tick()
    up.copies("b", 0)
    up.tick()
    up.pool.durable.failed(order, "too late", up.now)
    assert up.view().shortfall == "1 of 2 durable copies: the next is at 0% on b"


def test_failures_silence_and_standstill_bring_the_copy_elsewhere() -> None:
    for done, error, after in ((0, "disk full", 2.0), (None, "", ASKED_S), (7, "", STALL_S)):
        up = Nodes("a", "b", "c").start("a")
        assert targets(up.tick()) == ["b"]
        if done is not None:
            up.copies("b", done)
            up.tick()
            up.copies("b", done, running=not error, error=error)
        assert targets(up.tick(after + 1)) == ["c"], (done, error)


def test_no_more_copies_than_the_bound_at_a_time() -> None:
    up = Nodes("a", "b", "c", "d", settings=Keeping(at_a_time=2, copies=4, after_s=AFTER_S)).start(
        "a"
    )
    assert targets(up.tick()) == ["b", "c"]
    up.copies("b", 1)
    assert not up.tick(5)
    up.stored |= {"b"}
    del up.copying["b"]
    assert targets(up.tick()) == ["d"]


def test_after_a_restart_of_the_registry_nodes_are_given_time() -> None:
    up = Nodes("a", "b", "c").start("a")
    up.pool.durable.start(up.now)  # knows the model from before
    assert not up.tick(AFTER_S - 1)
    assert up.tick(2)


def leave(up: Nodes, name: str) -> tuple[ModelId, ...]:
    each = up.infos[name]
    models, _ = up.pool.leave(Leave(node=each.node, generation=each.generation), up.now, 0)
    return models


def test_a_node_stays_while_the_only_copy_is_copied_and_that_is_hurried() -> None:
    up = Nodes("a", "b").start("a")
    (order,) = up.tick()
    up.copies("b", 100)
    assert not up.tick()
    assert leave(up, "a") == (MODEL,)
    (again,) = up.tick()
    assert (again.info, again.bytes_per_s) == (order.info, LINK_SHARE * order.bytes_per_s)
    assert leave(up, "a") == (MODEL,)
    assert not up.tick()
    del up.copying["b"]
    up.stored.add("b")
    up.tick()
    assert leave(up, "a") == ()


def test_a_node_whose_models_are_elsewhere_goes_at_once_and_moves_nothing() -> None:
    up = Nodes("a", "b", "c").start("a", "b")
    assert leave(up, "a") == ()
    assert not up.tick(10)
    up.leave("a")
    assert not up.tick(AFTER_S - 1)


def test_a_node_goes_at_once_if_nobody_can_take_its_models() -> None:
    """Such as when all nodes are told to stop."""
    up = Nodes("a", "b").start("a")
    assert leave(up, "a") == (MODEL,)
    assert leave(up, "b") == ()
    assert leave(up, "a") == ()
    one = Nodes("a", "b", settings=Keeping(copies=1, after_s=AFTER_S)).start("a")
    assert leave(one, "a") == ()


def test_a_farewell_of_an_older_process_changes_nothing() -> None:
    up = Nodes("a", "b").start("a", "b")
    late = Leave(node=NodeId("a"), generation=Generation(9))
    assert up.pool.leave(late, up.now, 0) == ((), [])


def test_a_model_that_is_removed_is_forgotten() -> None:
    up = Nodes("a", "b").start("a")
    assert up.tick()
    up.pool.catalog.remove(record().name)
    assert not up.tick(30)
    up.pool.validate()


@pytest.mark.parametrize("method", ["_need_of", "lacking", "_is_settled", "_is_made", "rate"])
def test_a_bug_at_one_model_s_copies_holds_up_no_other_model_s(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(DurableCopies, method)

    def failing(durable: DurableCopies, about: object, *args: object) -> object:
        model = about.model_id if isinstance(about, ModelRecord) else about
        if MODEL in (model if isinstance(model, tuple) else (model,)):
            raise ZeroDivisionError("injected")
        return real(durable, about, *args)

    monkeypatch.setattr(DurableCopies, method, failing)
    up = Nodes("a", "b", "c").start("a")
    up.held.append(holding(Tier.DISK, 0, 1, 2, 3, model_id=OTHER))
    up.pool.catalog.put(record("other", OTHER))
    effects = [effect for _ in range(5) for effect in up.second()]
    assert OTHER in {each.model_id for each in effects if isinstance(each, CopyOrdered)}
    assert {each.model_id for each in effects if isinstance(each, ModelSkipped)} == {MODEL}


def told(up: Nodes) -> list[tuple[str, str]]:
    """The causes of orders of copies, as the model's story tells them, and their nodes."""
    story = up.pool.story.of(MODEL)
    return [(t.cause, t.subjects[0]) for t in story if t.text.startswith("is ordered")]


def causes(orders: list[CopyOrdered]) -> list[str]:
    return [order.cause for order in orders]


def test_an_order_names_what_made_the_copy_needed() -> None:
    up = Nodes("a", "b", "c").start("a")
    assert causes(up.tick()) == ["model_add"]
    up.stored = {"a", "b"}
    up.tick(3)
    up.leave("b")
    assert causes(up.tick(AFTER_S + 2)) == ["b"], "the node that went"
    assert told(up) == [("model_add", "b"), ("b", "c")]
    up.stored = {"a", "c"}
    up.join("d")
    up.tick(3)
    up.pool.set_duty(SetDuty(node=NodeId("c"), duty=Duty.DRAINING), up.now, 0)
    assert causes(up.tick(2)) == ["c"], "the node that leaves"
    up.stored |= {"d"}
    up.tick(3)
    up.stored = {"d"}
    assert causes(up.tick(2)) == ["node_status"], "the copy was lost on a node that stays"


def test_what_is_lacking_when_the_registry_starts_is_caused_by_that() -> None:
    up = Nodes("a", "b", "c").start("a")
    later = Nodes("a", "b", "c")
    later.pool.catalog.put(record())
    later.stored = {"a"}
    later.report()
    later.pool.start(later.now)
    assert causes(later.tick(AFTER_S + 2))[:1] == ["restart"]
    assert causes(up.tick())[:1] == ["model_add"]
