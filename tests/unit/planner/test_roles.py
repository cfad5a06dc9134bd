"""Who prefills and who decodes."""

from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.roles import assign_roles
from shared.ids import EventId, InstanceId, NodeId
from shared.messages.instances import Instance, InstanceState, Role, Stage

STATES = st.sampled_from(InstanceState)


def instance(number: int, state: InstanceState, stages: int = 1) -> Instance:
    path = tuple(Stage(NodeId(f"n{number}-{i}"), "tcp://x", i, i + 1) for i in range(stages))
    return Instance(
        id=InstanceId(f"i{number}"),
        stages=path,
        state=state,
        capacity=1.0,
        slots=8,
        event=EventId("ev"),
    )


def serving(count: int) -> tuple[Instance, ...]:
    return tuple(instance(number, InstanceState.SERVING) for number in range(count))


def roles(instances: tuple[Instance, ...]) -> list[Role]:
    return [each.role for each in instances]


@given(
    st.lists(st.tuples(STATES, st.sampled_from([1, 1, 2])), max_size=8),
    st.floats(0, 1, exclude_max=True),
)
def test_both_sides_have_somebody_or_everybody_does_both(
    kinds: list[tuple[InstanceState, int]], share: float
) -> None:
    before = tuple(instance(i, state, stages) for i, (state, stages) in enumerate(kinds))
    after = assign_roles(before, share)
    assert [each.id for each in after] == [each.id for each in before]
    able = [i for i in after if i.is_replica and i.state is InstanceState.SERVING]
    prefill = sum(i.role is Role.PREFILL for i in able)
    decode = sum(i.role is Role.DECODE for i in able)
    if share and len(able) > 1:
        assert prefill + decode == len(able)
        assert prefill
        assert decode
        assert abs(prefill - share * len(able)) <= 1
    else:
        assert prefill == decode == 0
    others = [i for i in after if i not in able]
    assert all(i.role is Role.BOTH for i in others)
    assert assign_roles(after, share) == after
    assert roles(assign_roles(after, 0.0)) == [Role.BOTH] * len(after)


def test_who_joins_last_prefills_and_the_oldest_of_them_turns_to_decode() -> None:
    two = assign_roles(serving(2), 0.5)
    assert roles(two) == [Role.DECODE, Role.PREFILL]
    assert roles(assign_roles((*two, instance(2, InstanceState.SERVING)), 0.4)) == [
        Role.DECODE,
        Role.DECODE,
        Role.PREFILL,
    ]
