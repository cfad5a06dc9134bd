"""What a node says it holds, in every state of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.node.core.residency import Residency
from shared.errors import StaleEpoch
from shared.ids import EventId, ModelId
from shared.messages.pool import Holding, Tier

MODEL = ModelId("m")
EVENT = EventId("ev-1")
EMPTY = Residency(MODEL, 3)


def filled(residency: Residency, *blocks: int) -> Residency:
    for block in blocks:
        residency = residency.hold(block).run(block)
    return residency


def test_nothing_held_is_nothing_said() -> None:
    assert EMPTY.holdings() == []


def test_an_active_model_says_its_space_is_taken_before_the_first_block() -> None:
    assert EMPTY.activate().holdings() == [Holding(MODEL, Tier.GPU, ())]


def test_a_block_that_is_not_attached_yet_is_in_host_memory() -> None:
    partly = filled(EMPTY.activate(), 2, 0).hold(1)
    assert partly.holdings() == [
        Holding(MODEL, Tier.GPU, (0, 2)),
        Holding(MODEL, Tier.HOST, (1,)),
    ]


def test_standby_keeps_the_bytes_and_forgets_the_plan() -> None:
    asleep = filled(EMPTY.activate().follow(EVENT, 3), 0, 1, 2).stand_by()
    assert asleep.holdings() == [Holding(MODEL, Tier.HOST, (0, 1, 2))]
    assert asleep.complete
    assert (asleep.event, asleep.revision) == (None, -1)


@pytest.mark.parametrize("revision", [2, 3])
def test_the_same_and_newer_revisions_are_followed(revision: int) -> None:
    assert EMPTY.follow(EVENT, 2).follow(EVENT, revision).revision == revision


def test_an_older_revision_is_stale() -> None:
    with pytest.raises(StaleEpoch, match="revision 1 of event ev-1 came after revision 2"):
        EMPTY.follow(EVENT, 2).follow(EVENT, 1)


def test_another_event_counts_from_its_own_first_revision() -> None:
    assert EMPTY.follow(EVENT, 5).follow(EventId("ev-2"), 0).revision == 0


STEPS = st.sampled_from(["hold 0", "hold 1", "hold 2", "activate", "stand_by", "attach"])


@given(st.lists(STEPS))
def test_every_held_block_is_said_once(steps: list[str]) -> None:
    residency = EMPTY
    for step in steps:
        if step.startswith("hold"):
            residency = residency.hold(int(step[-1]))
        elif step == "activate":
            residency = residency.activate()
        elif step == "stand_by":
            residency = residency.stand_by()
        elif residency.holdings() and residency.holdings()[0].tier is Tier.GPU:
            for block in residency.held:
                residency = residency.run(block)
    said = [block for holding in residency.holdings() for block in holding.blocks]
    assert sorted(said) == sorted(residency.held)
    tiers = [holding.tier for holding in residency.holdings()]
    assert len(set(tiers)) == len(tiers)
