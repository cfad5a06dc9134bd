"""Whose word it is that a term has begun: only who alone may speak on a subject says it there."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from shared import subjects
from shared.bus.base import On
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.errors import BadMessage, StaleEpoch
from shared.ids import NodeId
from shared.messages import Message, Ok, Ping
from shared.messages.base import Term
from shared.messages.pool import ReportStatus
from shared.messages.scaling import PlannerQuery
from shared.permissions import REGISTRY, TOPICS, topic_of

pytestmark = pytest.mark.virtual_time
NODE = NodeId("n1")
LATER, NOW, EARLIER = 9, 5, 4


def report(role: str, number: int) -> ReportStatus:
    return ReportStatus(term=Term(role, number))


class Listener:
    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker, "listener")
        self.other = MemoryBus(broker, "other")
        self.heard: list[Message] = []

    async def hears(self, subject: str, message: Message) -> bool:
        """Whether a handler gets it."""
        before = len(self.heard)
        subscription = await self.bus.subscribe(subject, On(Message, self._on_message))
        await self.other.publish(subject, message)
        await asyncio.sleep(1)
        await subscription.close()
        return len(self.heard) > before

    async def _on_message(self, message: Message) -> None:
        self.heard.append(message)


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener(MemoryBroker())
    async with listener.bus, listener.other:
        yield listener


async def test_a_later_term_ends_the_earlier_one(listener: Listener) -> None:
    assert await listener.hears(subjects.POOL_NODES, report("registry", NOW))
    assert not await listener.hears(subjects.POOL_NODES, report("registry", EARLIER))
    assert not await listener.hears(subjects.node_report(NODE), report("registry", EARLIER))
    assert listener.bus.stale == 2


@pytest.mark.parametrize("subject", [subjects.POOL_STATUS, subjects.ARRIVALS, "nobodys"])
@pytest.mark.parametrize("role", ["registry", "planner", "whoever"])
async def test_who_has_no_say_there_ends_no_term(
    listener: Listener, subject: str, role: str
) -> None:
    """Nodes may publish there, and could say anything."""
    assert not await listener.hears(subject, report(role, LATER))
    assert listener.bus.rejected == 1
    assert await listener.hears(subjects.POOL_NODES, report("registry", NOW))
    assert await listener.hears(subjects.EVENTS, report("planner", NOW))


@pytest.mark.parametrize(
    ("shared_by", "role", "own"),
    [
        (subjects.POOL_REPORT, "registry", subjects.POOL_MODELS),
        (subjects.node_report(NODE), "planner", subjects.node_plan(NODE)),
    ],
)
async def test_where_several_may_speak_none_ends_anothers_term(
    listener: Listener, shared_by: str, role: str, own: str
) -> None:
    assert await listener.hears(shared_by, report(role, LATER))
    assert await listener.hears(own, report(role, NOW))


async def test_requests_and_answers_are_held_to_it(listener: Listener) -> None:
    said = Term("registry", LATER)

    async def answer(request: Message) -> Message:
        return Ok(term=said)

    await listener.other.serve(subjects.PLANNER_STATE, PlannerQuery, answer)
    with pytest.raises(BadMessage, match="term of the registry does not belong here"):
        await listener.bus.request(subjects.PLANNER_STATE, PlannerQuery(), Ok, timeout=1)
    await listener.other.serve(subjects.REGISTRY_POOL, Ping, answer)
    request = msgspec.structs.replace(Ping(), term=said)
    with pytest.raises(BadMessage, match="term of the registry does not belong here"):
        await listener.bus.request(subjects.REGISTRY_POOL, request, Ok, timeout=1)
    said = Term("planner", NOW)
    await listener.bus.request(subjects.PLANNER_STATE, PlannerQuery(), Ok, timeout=1)
    said = Term("planner", EARLIER)
    with pytest.raises(StaleEpoch):
        await listener.bus.request(subjects.PLANNER_STATE, PlannerQuery(), Ok, timeout=1)


def test_each_topic_is_found_by_a_subject_of_it() -> None:
    for topic in TOPICS:
        assert topic_of(topic.subject.replace("*", "x-1")) is topic
        assert topic_of(topic.subject) is topic
    assert topic_of("ls.node.a.b.plan") is None
    found = topic_of(subjects.node_keep(NODE))
    assert found is not None
    assert found.says == REGISTRY
