"""Single steps of an answer with an idempotency key that the property test leaves open."""

import msgspec
import pytest

from services.gateway.core.key_limits import KeyLimits
from services.gateway.core.keyed import FLUSH_S, KeyedAnswer, State
from services.gateway.core.keyed_record import Fail, Generate, Kept, Look, Record, Stop, Write
from shared.errors import BusTimeout, CapacityExceeded, Conflict, RequestKillsNodes
from shared.ids import GatewayId, ModelId
from shared.story import Story

OWN, OTHER = GatewayId("own"), GatewayId("other")
RECORD = Record(digest="d", model_id=ModelId("m"), created=1, owner=OWN)


def generating() -> KeyedAnswer:
    """An answer that this gateway has begun, with one token."""
    core = KeyedAnswer("key", RECORD, Story(), 0.0)
    core.readers(1, 0.0)
    assert core.due(0.0) == Look()
    assert core.looked(None, 0, 0.0) == []
    assert core.due(0.0) == Write(RECORD, 0)
    assert core.written(1, 0.0) == [Generate()]
    core.generated(Kept(0, 7))
    return core


def test_an_answer_that_goes_on_otherwise_is_refused_and_the_other_s_record_stays() -> None:
    core = generating()
    assert isinstance(core.due(FLUSH_S), Write)
    assert core.refused(FLUSH_S) == []
    assert core.due(FLUSH_S) == Look()
    theirs = msgspec.structs.replace(RECORD, owner=OTHER, kept=(Kept(0, 8),))
    fail, stop = core.looked(theirs, 5, FLUSH_S)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, Conflict)
    assert stop == Stop()
    assert core.done
    assert core.due(9.0) is None


@pytest.mark.parametrize("writing", [False, True])
def test_an_answer_that_is_left_is_free_at_once(writing: bool) -> None:
    core = generating()
    if writing:
        assert isinstance(core.due(FLUSH_S), Write)
    assert core.leave("test", FLUSH_S) == [Stop()]
    assert not core.done
    if writing:
        core.written(2, FLUSH_S)
    work = core.due(FLUSH_S)
    assert isinstance(work, Write)
    assert work.record.owner is None
    assert work.record.kept == (Kept(0, 7),)
    core.written(3, FLUSH_S)
    assert core.done


def test_tokens_are_written_together() -> None:
    core = generating()
    core.generated(Kept(0, 8))
    assert core.due(FLUSH_S / 2) is None
    work = core.due(FLUSH_S)
    assert isinstance(work, Write)
    assert [kept.token for kept in work.record.kept] == [7, 8]
    core.written(2, FLUSH_S)
    assert core.due(2 * FLUSH_S) is None, "nothing is new"


def test_a_long_record_is_written_less_often() -> None:
    core = generating()
    for index in range(16_000):
        core.generated(Kept(0, index))
    assert core.due(FLUSH_S) is None
    work = core.due(0.25)
    assert isinstance(work, Write)
    assert len(work.record.kept) == 16_001
    core.written(2, 0.25)
    for _ in range(1000):
        core.generated(Kept(0, 1))
    core.ended(1.0)
    last = core.due(1.0)
    assert isinstance(last, Write)
    assert not last.record.over, "it has no room for all tokens"
    assert last.record.owner is None
    core.written(3, 1.0)
    assert core.state is State.OVER


def test_keys_count_until_their_answers_are_no_longer_kept() -> None:
    limits = KeyLimits(2, 10.0)
    limits.take("a", "1", 0.0)
    limits.take("a", "2", 4.0)
    limits.take("a", "1", 5.0)
    limits.take("b", "1", 5.0)
    with pytest.raises(CapacityExceeded) as caught:
        limits.take("a", "3", 6.0)
    assert caught.value.retry_after_s == 4.0
    limits.take("a", "3", 10.0)


REFUSAL = RequestKillsNodes("it killed two nodes")


@pytest.mark.parametrize("trouble", ["none", "writing", "unanswered", "taken over"])
def test_an_answer_that_is_refused_for_good_is_refused_at_every_gateway(trouble: str) -> None:
    core = generating()
    if trouble == "writing":
        assert isinstance(core.due(FLUSH_S), Write)
    fail, _ = core.failed(REFUSAL, FLUSH_S)
    assert isinstance(fail, Fail)
    if trouble == "writing":
        core.written(2, FLUSH_S)
    work = core.due(FLUSH_S)
    if trouble == "unanswered":
        core.unanswered(BusTimeout("the store is away"), FLUSH_S)
        assert not core.done
        assert core.due(1.0) == Look()
        core.looked(RECORD, 1, 1.0)
        work = core.due(1.0)
    elif trouble == "taken over":
        core.refused(FLUSH_S)
        assert core.due(1.0) == Look()
        core.looked(msgspec.structs.replace(RECORD, owner=OTHER), 9, 1.0)
        work = core.due(1.0)
    assert isinstance(work, Write)
    assert (work.record.refused, work.record.over) == ("it killed two nodes", True)
    core.written(10, 1.0)
    assert core.done
    other = KeyedAnswer("key", msgspec.structs.replace(RECORD, owner=OTHER), Story(), 2.0)
    other.readers(1, 2.0)
    (fail,) = other.looked(work.record, 10, 2.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, RequestKillsNodes)
    assert other.due(9.0) is None


def test_an_answer_that_another_gateway_has_ended_is_not_refused_after_all() -> None:
    core = generating()
    core.failed(REFUSAL, FLUSH_S)
    core.due(FLUSH_S)
    core.refused(FLUSH_S)
    core.looked(msgspec.structs.replace(RECORD, owner=None, over=True), 9, 1.0)
    assert core.done
