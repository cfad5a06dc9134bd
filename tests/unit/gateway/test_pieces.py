"""Long answers in pieces are the same JSON."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.pieces import Lists

PIECE_BYTES = 40
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(st.lists(values, max_size=30)), values)
def test_pieces_make_the_answer_and_none_is_long(found: list[list[object]], other: object) -> None:
    lists = Lists(PIECE_BYTES)
    body = {"before": other, "lists": [lists.add(each) for each in found], "after": other}
    pieces = lists.into(body)
    expected = msgspec.json.encode({"before": other, "lists": found, "after": other})
    assert b"".join(pieces) == expected
    longest = max((len(msgspec.json.encode(v)) for each in found for v in each), default=0)
    commas = PIECE_BYTES + 2
    rest = len(msgspec.json.encode({"before": other, "lists": [], "after": other}))
    assert max(map(len, pieces)) <= max(PIECE_BYTES + longest + commas, rest)
