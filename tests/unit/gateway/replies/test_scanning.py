"""Where JSON objects end, and where texts stop being any."""

import pytest

from services.gateway.replies.scanning import ObjectScan


@pytest.mark.parametrize(
    ("text", "end", "ended"),
    [
        ('{"a": [1, {"b": "}\\"]"}]} rest', 25, True),
        ("{} {}", 2, True),
        ('{"a": [}', 7, False),
        ('{"a": <', 6, False),
        ("[1]", 0, False),
        ('{"a": {', 7, None),
    ],
)
def test_the_end_of_an_object(text: str, end: int, ended: bool | None) -> None:
    """`ended`: None if it may still become one."""
    scan = ObjectScan()
    assert scan.scan(text, 0) == end
    assert (scan.ended, scan.broken) == (ended is True, ended is False)
    pieces = ObjectScan()
    assert [pieces.scan(text[: at + 1], at) for at in range(end)] == list(range(1, end + 1))
    assert pieces.ended == scan.ended
