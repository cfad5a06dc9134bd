"""A gateway that is told only what changes of a model's instances ends with the planner's set,
whatever is lost, repeated or late on the way, and whichever planner says it."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from shared.ids import InstanceId, ModelId, ModelName, NodeId
from shared.messages import decode, encode
from shared.messages.changes import change_of, whole_set
from shared.messages.instances import Instance, InstanceChange, InstanceSet, InstanceState, Stage

FATES = st.sampled_from(["comes", "comes", "comes", "comes twice", "is late", "is lost"])
INSTANCES = st.dictionaries(
    st.sampled_from("abcde"),
    st.tuples(st.sampled_from(list(InstanceState)), st.integers(1, 2)),
)


@dataclass(frozen=True)
class Step:
    """What the planner publishes next, and what becomes of it."""

    instances: dict[str, tuple[InstanceState, int]]
    whole: bool
    another: bool
    """Whether another planner has taken over, which says all it knows first."""
    within_s: float
    fate: str


STEPS = st.builds(
    Step, INSTANCES, st.booleans(), st.sampled_from([False] * 5 + [True]), st.floats(0, 1), FATES
)


def set_of(step: Step, epoch: int, revision: int) -> InstanceSet:
    def instance(name: str) -> Instance:
        state, slots = step.instances[name]
        stages = (Stage(NodeId(name), f"tcp://{name}", 0, 4),)
        return Instance(
            id=InstanceId(name), stages=stages, state=state, capacity=1.0, slots=slots, event=None
        )

    return InstanceSet(
        name=ModelName("m"),
        model_id=ModelId("id"),
        epoch=epoch,
        revision=revision,
        instances=tuple(map(instance, step.instances)),
        within_s=step.within_s,
    )


def same(one: InstanceSet, other: InstanceSet) -> bool:
    return (
        {i.id: i for i in one.instances} == {i.id: i for i in other.instances}
        and len(one.instances) == len(other.instances)
        and (one.epoch, one.revision, one.within_s) == (other.epoch, other.revision, other.within_s)
    )


class Planner:
    def __init__(self) -> None:
        self.now: InstanceSet | None = None
        self._epoch, self._revision = 1, 0

    def publish(self, step: Step) -> InstanceSet | InstanceChange:
        known = None if step.another else self.now
        if step.another:
            self._epoch, self._revision = self._epoch + 1, 0
        self.now = set_of(step, self._epoch, self._revision)
        if known is None or not same(known, self.now):
            self._revision += 1
            self.now = set_of(step, self._epoch, self._revision)
        return self.now if known is None or step.whole else change_of(known, self.now)


class Gateway:
    def __init__(self) -> None:
        self.known: InstanceSet | None = None

    def hear(self, message: InstanceSet | InstanceChange, planner: Planner) -> None:
        if isinstance(message, InstanceChange):
            found = whole_set(self.known, message) or planner.now  # it asks
            assert found is not None
        else:
            found = message
        known = self.known
        if known is None or (found.epoch, found.revision) >= (known.epoch, known.revision):
            self.known = found


@given(st.lists(STEPS, min_size=1, max_size=20))
def test_changes_of_sets(history: list[Step]) -> None:
    planner, gateway = Planner(), Gateway()
    late: list[InstanceSet | InstanceChange] = []
    for step in history:
        message = decode(encode(planner.publish(step)))
        assert isinstance(message, InstanceSet | InstanceChange)
        if step.fate == "is late":
            late.append(message)
        elif step.fate != "is lost":
            twice = step.fate == "comes twice"
            for each in [message, *([message] if twice else []), *late]:
                gateway.hear(each, planner)
                assert gateway.known is not None
                assert planner.now is not None
                assert same(gateway.known, planner.now)
            late = []


@given(STEPS, STEPS)
def test_a_change_names_only_what_differs(one: Step, other: Step) -> None:
    before, after = set_of(one, 1, 1), set_of(other, 1, 2)
    change = change_of(before, after)
    assert set(change.gone) == one.instances.keys() - other.instances.keys()
    assert {i.id for i in change.now.instances} == {
        name for name, said in other.instances.items() if one.instances.get(name) != said
    }
