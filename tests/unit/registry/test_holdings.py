from services.registry.core.holdings import ORPHAN_S, Holdings, Taken
from shared.ids import Generation, NodeId
from shared.messages.pool import Tier
from tests.unit.registry.builders import MODEL, OTHER, holding, info, status


def test_an_older_report_that_comes_late_is_ignored() -> None:
    held = Holdings()
    assert held.report(status(seq=2, free=5), 0.0) is Taken.IN
    assert held.report(status(seq=1, free=7), 0.1) is Taken.LATE
    assert held.report(status(seq=2, free=7), 0.2) is Taken.LATE
    assert held.of(info()) == status(seq=2, free=5)


def test_generations_count_apart() -> None:
    held = Holdings()
    held.report(status(seq=9), 0.0)
    assert held.report(status(seq=1, generation=2), 0.1) is Taken.IN
    assert held.of(info(generation=2)) == status(seq=1, generation=2)
    assert held.of(info(generation=1)) == status(seq=9)


def test_blocks_by_tier_of_one_model() -> None:
    held = Holdings()
    held.report(
        status(
            "a",
            holding(Tier.GPU, 0, 1),
            holding(Tier.GPU, 3),
            holding(Tier.DISK, 2, model_id=OTHER),
            holding(Tier.HOST),
        ),
        0.0,
    )
    assert held.blocks(info(), MODEL) == {Tier.GPU: {0, 1, 3}, Tier.HOST: set()}
    assert held.blocks(info("b"), MODEL) == {}


def test_reports_without_a_lease_are_forgotten_after_a_while() -> None:
    held = Holdings()
    held.report(status("a"), 0.0)
    held.report(status("b"), 0.0)
    held.prune({(NodeId("a"), Generation(1))}, ORPHAN_S)
    assert held.of(info("a")) is not None
    assert held.of(info("b")) is None


def test_a_fresh_report_waits_for_its_lease() -> None:
    held = Holdings()
    held.report(status("b"), 0.0)
    held.prune(set(), ORPHAN_S / 2)
    assert held.of(info("b")) is not None


def test_who_holds_a_model_follows_the_reports() -> None:
    held = Holdings()
    held.report(status("b", holding(Tier.GPU, 0)), 0.0)
    held.report(status("a", holding(Tier.DISK), holding(Tier.HOST, 1, model_id=OTHER)), 0.0)
    held.report(status("a", generation=2), 0.0)
    assert held.holders(MODEL) == ["a", "b"]
    assert held.holders(OTHER) == ["a"]
    held.report(status("a", holding(Tier.GPU, 2), seq=2, free=7), 1.0)
    assert held.holders(OTHER) == []
    assert held.blocks(info("a"), MODEL) == {Tier.GPU: {2}}
    held.prune((), ORPHAN_S)
    assert held.holders(MODEL) == ["a"]
    held.prune((), 2 * ORPHAN_S)
    assert held.holders(MODEL) == []


def test_a_report_that_repeats_the_holdings_still_says_the_rest() -> None:
    held = Holdings()
    held.report(status("a", holding(Tier.GPU, 0), free=5), 0.0)
    before = held.blocks(info("a"), MODEL)
    held.report(status("a", holding(Tier.GPU, 0), seq=2, free=7), 1.0)
    assert held.blocks(info("a"), MODEL) is before
    assert held.of(info("a")) == status("a", holding(Tier.GPU, 0), seq=2, free=7)


def test_who_has_a_model_in_memory_follows_the_reports() -> None:
    held = Holdings()
    held.report(status("b", holding(Tier.GPU, 0), holding(Tier.DISK, 1, model_id=OTHER)), 0.0)
    held.report(status("a", holding(Tier.DISK, 0, 1), holding(Tier.HOST, model_id=OTHER)), 0.0)
    assert set(held.sharers(MODEL)) == {(NodeId("b"), Generation(1))}
    assert not held.sharers(OTHER)  # space alone is no copy, and a disk is no memory
    assert set(held.in_memory(info("a"))) == {OTHER}
    assert set(held.in_memory(info("b"))) == {MODEL}
    held.report(status("b", holding(Tier.DISK, 0), seq=2), 1.0)
    assert not held.sharers(MODEL)
    assert not held.in_memory(info("b"))
    assert held.holders(MODEL) == ["a", "b"]
