import pytest

from shared import errors
from shared.errors import LambdaScaleError, from_code
from shared.messages import ErrorReply

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, LambdaScaleError)
]


def test_no_two_errors_share_a_code() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_crosses_the_wire_with_its_type(cls: type[LambdaScaleError]) -> None:
    there = ErrorReply.of(cls("what was wrong")).error()
    assert type(there) is cls
    assert str(there) == "what was wrong"


def test_an_unknown_code_is_an_untyped_error() -> None:
    assert type(from_code("from_the_future", "why")) is LambdaScaleError
