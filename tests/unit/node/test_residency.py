"""What a node says it holds, in every state of a model."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.node.core.residency import Mode, PlanId, Planners, Residency
from shared.errors import IllegalTransition, StaleEpoch
from shared.ids import EventId, ModelId
from shared.messages.pool import Holding, Tier
from shared.story import Story

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
    asleep = filled(EMPTY.activate().follow(PlanId(EVENT, 3)), 0, 1, 2).stand_by()
    assert asleep.holdings() == [Holding(MODEL, Tier.HOST, (0, 1, 2))]
    assert asleep.complete
    assert asleep.plan is None


@pytest.mark.parametrize("revision", [2, 3])
def test_the_same_and_newer_revisions_are_followed(revision: int) -> None:
    newer = PlanId(EVENT, revision)
    assert EMPTY.follow(PlanId(EVENT, 2)).follow(newer).plan == newer


def test_an_older_revision_is_stale() -> None:
    with pytest.raises(StaleEpoch, match="revision 1 of event ev-1 came after revision 2"):
        EMPTY.follow(PlanId(EVENT, 2)).follow(PlanId(EVENT, 1))


def test_another_event_counts_from_its_own_first_revision() -> None:
    other = PlanId(EventId("ev-2"), 0)
    assert EMPTY.follow(PlanId(EVENT, 5)).follow(other).plan == other


# --- the table ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "step"),
    [
        ("activate while active", lambda: EMPTY.activate().activate()),
        ("stand by while standby", EMPTY.stand_by),
        ("hold while standby", lambda: EMPTY.hold(0)),
        ("hold while active", lambda: EMPTY.activate().hold(0).hold(0)),
        ("hold while active", lambda: EMPTY.activate().hold(3)),
        ("hold while active", lambda: EMPTY.activate().hold(-1)),
        ("run while active", lambda: EMPTY.activate().run(0)),
        ("run while active", lambda: EMPTY.activate().hold(0).run(0).run(0)),
        ("run while standby", lambda: EMPTY.activate().hold(0).stand_by().run(0)),
    ],
)
def test_other_steps_are_refused(says: str, step: Callable[[], Residency]) -> None:
    with pytest.raises(IllegalTransition, match=f"m: {says}"):
        step()


def test_an_illegal_step_tells_what_came_before() -> None:
    story = Story()
    story.tell(1.0, "ev-1", "follows revision 3", MODEL)
    with pytest.raises(IllegalTransition, match=r"follows revision 3 \(ev-1\)"):
        Residency(MODEL, 3, story).stand_by()


@pytest.mark.parametrize(
    "wrong",
    [
        replace(EMPTY, held=frozenset({3})),
        replace(EMPTY, mode=Mode.ACTIVE, runnable=frozenset({1})),
        replace(EMPTY, held=frozenset({1}), runnable=frozenset({1})),
    ],
)
def test_what_cannot_be_is_not_valid(wrong: Residency) -> None:
    with pytest.raises(IllegalTransition):
        wrong.validate()


class Machine(RuleBasedStateMachine):
    """Events in any order, early, late and repeated, beside a model of what they may do."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = EMPTY
        self.active = False
        self.held: set[int] = set()
        self.run: set[int] = set()
        self.newest: dict[str, int] = {}

    def take(self, legal: bool, step: Callable[[], Residency]) -> bool:
        if not legal:
            with pytest.raises(IllegalTransition):
                step()
            return False
        self.residency = step()
        return True

    @rule()
    def activate(self) -> None:
        if self.take(not self.active, self.residency.activate):
            self.active = True

    @rule()
    def stand_by(self) -> None:
        if self.take(self.active, self.residency.stand_by):
            self.active, self.run, self.newest = False, set(), {}

    @rule(block=st.integers(-1, 3))
    def hold(self, block: int) -> None:
        legal = self.active and block not in self.held and 0 <= block < 3
        if self.take(legal, lambda: self.residency.hold(block)):
            self.held.add(block)

    @rule(block=st.integers(0, 2))
    def attach(self, block: int) -> None:
        legal = self.active and block in self.held - self.run
        if self.take(legal, lambda: self.residency.run(block)):
            self.run.add(block)

    @rule(event=st.sampled_from(["ev-1", "ev-2"]), revision=st.integers(0, 3))
    def follow(self, event: str, revision: int) -> None:
        plan = PlanId(EventId(event), revision)
        if revision < self.newest.get(event, 0):
            with pytest.raises(StaleEpoch):
                self.residency.follow(plan)
        else:
            self.residency = self.residency.follow(plan)
            self.newest = {event: revision}

    @invariant()
    def says_what_it_is(self) -> None:
        self.residency.validate()
        assert (set(self.residency.held), set(self.residency.runnable)) == (self.held, self.run)
        said = [block for holding in self.residency.holdings() for block in holding.blocks]
        assert sorted(said) == sorted(self.held)
        tiers = [holding.tier for holding in self.residency.holdings()]
        assert len(set(tiers)) == len(tiers)
        assert (Tier.GPU in tiers) == self.active


TestMachine = Machine.TestCase


# --- planners -------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5)))
def test_the_newest_planner_that_spoke_is_obeyed(epochs: list[int]) -> None:
    planners, newest = Planners(), 0
    for epoch in epochs:
        if 0 < epoch < newest:
            with pytest.raises(StaleEpoch, match=f"epoch {epoch} came after epoch {newest}"):
                planners.obey(epoch)
        else:
            planners.obey(epoch)
            newest = max(newest, epoch)
