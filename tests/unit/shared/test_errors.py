import pytest

from shared import errors
from shared.errors import BadInput, BusTimeout, CutOff, LambdaScaleError, ServiceFailed, from_code
from shared.messages import ErrorReply, decode, encode

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, LambdaScaleError) and value is not CutOff
]


def test_no_two_errors_share_a_code() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not LambdaScaleError])
def test_an_error_crosses_the_wire_with_its_type(cls: type[LambdaScaleError]) -> None:
    there = ErrorReply.of(cls("what was wrong")).error()
    assert type(there) is cls
    assert str(there) == "what was wrong"


def test_who_was_cut_off_is_a_matter_of_that_process() -> None:
    assert type(ErrorReply.of(CutOff("not connected to NATS")).error()) is BusTimeout


def test_an_unknown_code_is_an_untyped_error() -> None:
    assert type(from_code("from_the_future", "why")) is LambdaScaleError


@pytest.mark.parametrize("code", ["error", "from_the_future"])
def test_a_reply_without_a_known_type_is_a_failure_of_the_service(code: str) -> None:
    error = ErrorReply(code=code, message="why").error()
    assert (type(error), str(error)) == (ServiceFailed, "why")


def test_an_error_that_quotes_too_much_or_no_text_crosses_the_wire_shortened() -> None:
    reply = ErrorReply.of(BadInput("\udcff" + "x" * 10**7))
    assert decode(encode(reply)) == reply
    assert reply.message.startswith("?x")
    assert len(reply.message) < 10_000
