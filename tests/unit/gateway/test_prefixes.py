"""What of a prompt lies where."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.prefixes import HOLDERS, PART, Prefixes, marks_of
from shared.ids import NodeId

A, B = NodeId("a"), NodeId("b")
TOKENS = st.lists(st.integers(0, 1), max_size=4).map(
    lambda parts: tuple(t for part in parts for t in [part] * PART)
)


@given(one=TOKENS, other=TOKENS, rest=st.integers(0, PART - 1))
def test_what_begins_alike_has_its_first_marks_in_common(
    one: tuple[int, ...], other: tuple[int, ...], rest: int
) -> None:
    alike = 0
    while alike < min(len(one), len(other)) and one[alike] == other[alike]:
        alike += 1
    first, second = marks_of(one), marks_of((*other, *[2] * rest))
    common = alike // PART
    assert first[:common] == second[:common]
    assert first[common : common + 1] != second[common : common + 1] or not first[common:]
    assert marks_of(one, first[:1]) == first


@given(sent=st.lists(st.tuples(TOKENS, st.sampled_from([A, B])), max_size=8), asked=TOKENS)
def test_the_longest_beginning_is_found_first(
    sent: list[tuple[tuple[int, ...], NodeId]], asked: tuple[int, ...]
) -> None:
    prefixes = Prefixes()
    for tokens, node in sent:
        prefixes.learn(marks_of(tokens), node)
    expected: dict[NodeId, int] = {}
    for tokens, node in sent:
        marks, wanted = marks_of(tokens), marks_of(asked)
        same = sum(a == b for a, b in zip(marks, wanted, strict=False))
        if same:
            expected[node] = max(expected.get(node, 0), PART * same)
    found = [(tokens, n) for tokens, nodes in prefixes.find(marks_of(asked)) for n in nodes]
    assert {node: tokens for tokens, node in found} == expected
    assert [tokens for tokens, _ in found] == sorted(expected.values(), reverse=True)


def test_what_was_not_used_for_long_is_forgotten_from_its_end() -> None:
    prefixes = Prefixes(known=3)
    old, new = marks_of([1] * 2 * PART), marks_of([2] * 2 * PART)
    prefixes.learn(old, A)
    prefixes.learn(new, B)
    assert list(prefixes.find(old)) == [(PART, [A])]
    assert list(prefixes.find(new)) == [(2 * PART, [B])]


def test_of_many_nodes_the_last_are_remembered() -> None:
    prefixes, marks = Prefixes(), marks_of([1] * PART)
    for i in range(2 * HOLDERS):
        prefixes.learn(marks, NodeId(f"n{i}"))
    ((_, found),) = prefixes.find(marks)
    assert found == [NodeId(f"n{i}") for i in range(HOLDERS, 2 * HOLDERS)]
