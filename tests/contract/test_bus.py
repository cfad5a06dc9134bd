"""Messages: what every bus promises of publish, subscribe, request and serve."""

import asyncio

import pytest

from shared.bus.base import Bus, On
from shared.bus.delivery import MAX_PAYLOAD
from shared.errors import (
    BadMessage,
    BusError,
    BusTimeout,
    CapacityExceeded,
    CutOff,
    IllegalTransition,
    LambdaScaleError,
    NoResponders,
    ServiceFailed,
)
from shared.ids import ModelName, RequestId
from shared.messages import Message, Ok, Ping
from shared.messages.pool import ModelRemove
from shared.messages.serving import Cancel
from tests.contract.conftest import OpenBus
from tests.support.malformed import ERRORS

WAIT_S = 100.0


def numbered(number: int) -> Cancel:
    return Cancel(request=RequestId("r"), attempt=number)


class Collector:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    async def __call__(self, message: Message) -> None:
        self.messages.put_nowait(message)

    async def take(self, count: int) -> list[Message]:
        async with asyncio.timeout(WAIT_S):
            return [await self.messages.get() for _ in range(count)]


async def echo(message: Message) -> Message:
    return message


async def test_every_subscriber_gets_messages_in_the_order_published(bus: Bus, other: Bus) -> None:
    near, far = Collector(), Collector()
    await bus.subscribe("orders", On(Message, near))
    await other.subscribe("orders", On(Message, far))
    sent = [numbered(i) for i in range(100)]
    for message in sent:
        await bus.publish("orders", message)
    assert await near.take(100) == sent
    assert await far.take(100) == sent


async def test_a_subscription_gets_only_its_subject(bus: Bus, other: Bus) -> None:
    wanted, unwanted = Collector(), Collector()
    await other.subscribe("wanted", On(Message, wanted))
    await other.subscribe("unwanted", On(Message, unwanted))
    await bus.publish("wanted", numbered(1))
    assert await wanted.take(1) == [numbered(1)]
    assert unwanted.messages.empty()


async def test_a_handler_runs_one_message_after_the_other(bus: Bus) -> None:
    running = 0
    most = 0
    done = Collector()

    async def handler(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        await done(message)

    await bus.subscribe("subject", On(Message, handler))
    for i in range(10):
        await bus.publish("subject", numbered(i))
    assert await done.take(10) == [numbered(i) for i in range(10)]
    assert most == 1


async def test_publishing_to_nobody_is_no_error(bus: Bus) -> None:
    await bus.publish("nobody", numbered(0))


async def test_a_handler_that_raises_keeps_its_subscription(bus: Bus) -> None:
    done = Collector()

    async def handler(message: Message) -> None:
        if message == numbered(0):
            raise RuntimeError("a bug")
        await done(message)

    await bus.subscribe("subject", On(Message, handler))
    await bus.publish("subject", numbered(0))
    await bus.publish("subject", numbered(1))
    assert await done.take(1) == [numbered(1)]
    assert getattr(bus, "failed") == 1  # noqa: B009 - both buses count, the protocol does not say


async def test_a_handler_may_raise_whatever_it_likes(bus: Bus) -> None:
    done = Collector()

    async def handler(message: Cancel) -> None:
        if message.attempt < len(ERRORS):
            raise ERRORS[message.attempt]
        await done(message)

    await bus.subscribe("subject", On(Cancel, handler))
    for number in range(len(ERRORS) + 1):
        await bus.publish("subject", numbered(number))
    assert await done.take(1) == [numbered(len(ERRORS))]


async def test_a_server_may_raise_whatever_it_likes(bus: Bus) -> None:
    async def server(message: Cancel) -> Message:
        raise ERRORS[message.attempt]

    await bus.serve("service", Cancel, server)
    for number, error in enumerate(ERRORS):
        with pytest.raises(LambdaScaleError) as caught:
            await bus.request("service", numbered(number), Cancel, timeout=WAIT_S)
        typed = isinstance(error, LambdaScaleError) and type(error) is not LambdaScaleError
        refusal = typed and not isinstance(error, IllegalTransition)
        told = BusTimeout if isinstance(error, CutOff) else type(error)
        assert caught.type is (told if refusal else ServiceFailed)


async def test_nothing_arrives_after_a_subscription_is_closed(bus: Bus, other: Bus) -> None:
    closed, fence = Collector(), Collector()
    subscription = await bus.subscribe("subject", On(Message, closed))
    await bus.subscribe("fence", On(Message, fence))
    await other.publish("subject", numbered(0))
    await closed.take(1)
    await other.publish("subject", numbered(1))
    await subscription.close()
    await other.publish("subject", numbered(2))
    await other.publish("fence", numbered(3))
    await fence.take(1)
    assert closed.messages.empty()


async def test_a_handler_may_close_its_own_subscription(bus: Bus) -> None:
    ended = asyncio.Event()
    calls = 0

    async def handler(message: Message) -> None:
        nonlocal calls
        calls += 1
        await subscription.close()
        ended.set()

    subscription = await bus.subscribe("subject", On(Message, handler))
    fence = Collector()
    await bus.subscribe("fence", On(Message, fence))
    await bus.publish("subject", numbered(0))
    await bus.publish("subject", numbered(1))
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    await bus.publish("fence", numbered(2))
    await fence.take(1)
    assert calls == 1


async def test_a_request_gets_the_answer(bus: Bus, other: Bus) -> None:
    await other.serve("service", Cancel, echo)
    assert await bus.request("service", numbered(7), Cancel, timeout=WAIT_S) == numbered(7)


async def test_a_request_of_another_kind_is_a_bad_message_that_names_both(
    bus: Bus, other: Bus
) -> None:
    await other.serve("service", Cancel, echo)
    with pytest.raises(BadMessage, match="service takes Cancel, not ModelRemove"):
        await bus.request("service", ModelRemove(name=ModelName("m")), Ok, timeout=WAIT_S)
    assert await bus.request("service", numbered(1), Cancel, timeout=WAIT_S) == numbered(1)


async def test_each_kind_goes_to_its_handler_and_others_are_counted(bus: Bus) -> None:
    cancels, removals = Collector(), Collector()
    await bus.subscribe("subject", On(Cancel, cancels), On(ModelRemove, removals))
    removal = ModelRemove(name=ModelName("m"))
    for message in (numbered(0), Ping(), removal, numbered(1)):
        await bus.publish("subject", message)
    assert await cancels.take(2) == [numbered(0), numbered(1)]
    assert await removals.take(1) == [removal]
    assert getattr(bus, "ignored") == 1  # noqa: B009 - both buses count, the protocol does not say


async def test_the_bus_itself_answers_pings(bus: Bus, other: Bus) -> None:
    async def server(message: Message) -> Message:
        raise AssertionError("a ping is not the server's business")

    await other.serve("service", Cancel, server)
    assert await bus.request("service", Ping(), Ok, timeout=WAIT_S) == Ok()


async def test_requests_are_served_concurrently(bus: Bus, other: Bus) -> None:
    together = asyncio.Barrier(8)

    async def server(message: Message) -> Message:
        await together.wait()
        return message

    await other.serve("service", Cancel, server)
    answers = await asyncio.gather(
        *(bus.request("service", numbered(i), Cancel, timeout=WAIT_S) for i in range(8))
    )
    assert answers == [numbered(i) for i in range(8)]


async def test_one_of_several_servers_answers(bus: Bus, other: Bus) -> None:
    served = 0

    async def server(message: Message) -> Message:
        nonlocal served
        served += 1
        return message

    await bus.serve("service", Cancel, server)
    await other.serve("service", Cancel, server)
    for i in range(10):
        await bus.request("service", numbered(i), Cancel, timeout=WAIT_S)
    assert served == 10


async def test_each_group_of_servers_gets_each_request(bus: Bus, other: Bus) -> None:
    first, second = Collector(), Collector()

    async def slow(message: Message) -> Message:
        await first(message)
        await asyncio.Event().wait()  # for ever
        return message

    async def server(message: Message) -> Message:
        await second(message)
        return message

    await bus.serve("service", Cancel, slow, group="one")
    await other.serve("service", Cancel, server, group="two")
    for i in range(3):
        assert await bus.request("service", numbered(i), Cancel, timeout=WAIT_S) == numbered(i)
    assert await first.take(3) == await second.take(3) == [numbered(i) for i in range(3)]


async def test_a_server_answers_a_message_that_wants_no_answer_to_nobody(bus: Bus) -> None:
    done = Collector()

    async def server(message: Message) -> Message:
        await done(message)
        return Ok()

    await bus.serve("service", Cancel, server)
    await bus.publish("service", numbered(0))
    assert await done.take(1) == [numbered(0)]


async def test_a_typed_error_reaches_the_requester(bus: Bus, other: Bus) -> None:
    async def server(message: Message) -> Message:
        raise CapacityExceeded("arena full: 3 of 3 blocks")

    await other.serve("service", Cancel, server)
    with pytest.raises(CapacityExceeded, match="arena full: 3 of 3 blocks"):
        await bus.request("service", numbered(0), Ok, timeout=WAIT_S)


async def test_a_bug_in_a_server_is_a_failure_of_the_service_and_it_serves_on(
    bus: Bus, other: Bus
) -> None:
    async def server(message: Message) -> Message:
        if message == numbered(0):
            raise ZeroDivisionError("a bug")
        return message

    await other.serve("service", Cancel, server)
    with pytest.raises(ServiceFailed, match="two failed: ZeroDivisionError"):
        await bus.request("service", numbered(0), Cancel, timeout=WAIT_S)
    assert await bus.request("service", numbered(1), Cancel, timeout=WAIT_S) == numbered(1)


async def test_an_answer_of_another_kind_is_a_bad_message(bus: Bus, other: Bus) -> None:
    await other.serve("service", Cancel, echo)
    with pytest.raises(BadMessage, match="Cancel"):
        await bus.request("service", numbered(0), Ok, timeout=WAIT_S)


async def test_a_request_to_nobody_says_so(bus: Bus) -> None:
    with pytest.raises(NoResponders, match="nobody"):
        await bus.request("nobody", numbered(0), Ok, timeout=WAIT_S)


async def test_a_request_to_a_server_that_left_says_so(bus: Bus, other: Bus) -> None:
    subscription = await other.serve("service", Cancel, echo)
    await subscription.close()
    with pytest.raises(NoResponders):
        await other.request("service", numbered(0), Cancel, timeout=WAIT_S)


async def test_a_request_that_is_not_answered_times_out(bus: Bus, other: Bus) -> None:
    entered = asyncio.Event()

    async def server(message: Message) -> Message:
        entered.set()
        await asyncio.Event().wait()
        return message

    await other.serve("service", Cancel, server)
    with pytest.raises(BusTimeout, match="service"):
        await bus.request("service", numbered(0), Cancel, timeout=0.05)
    assert entered.is_set()


async def test_a_request_times_out_where_only_listeners_are(bus: Bus, other: Bus) -> None:
    heard = Collector()
    await other.subscribe("service", On(Message, heard))
    with pytest.raises(BusTimeout):
        await bus.request("service", numbered(0), Cancel, timeout=0.05)
    assert await heard.take(1) == [numbered(0)]


async def test_a_message_over_the_limit_is_refused(bus: Bus) -> None:
    huge = ModelRemove(name=ModelName("x" * MAX_PAYLOAD))
    with pytest.raises(BusError, match="limit"):
        await bus.publish("subject", huge)
    with pytest.raises(BusError, match="limit"):
        await bus.request("subject", huge, Ok, timeout=WAIT_S)


async def test_an_answer_over_the_limit_is_an_error_at_the_requester(bus: Bus, other: Bus) -> None:
    async def server(message: Message) -> Message:
        return ModelRemove(name=ModelName("x" * MAX_PAYLOAD))

    await other.serve("service", Cancel, server)
    with pytest.raises(BusError, match="limit"):
        await bus.request("service", numbered(0), ModelRemove, timeout=WAIT_S)


async def test_closing_ends_handlers_servers_and_requests(open_bus: OpenBus, bus: Bus) -> None:
    server_entered, handler_entered = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def hang(entered: asyncio.Event, name: str) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def server(message: Message) -> Message:
        await hang(server_entered, "server")
        return message

    async def handler(message: Message) -> None:
        await hang(handler_entered, "handler")

    closing = await open_bus("closing")
    await closing.serve("service", Cancel, server)
    await closing.subscribe("subject", On(Message, handler))
    await bus.publish("subject", numbered(0))
    request = asyncio.ensure_future(closing.request("service", numbered(0), Ok, timeout=WAIT_S))
    async with asyncio.timeout(WAIT_S):
        await server_entered.wait()
        await handler_entered.wait()
        await closing.__aexit__(None, None, None)
        with pytest.raises(BusError, match="closing"):
            await request
    assert sorted(ended) == ["handler", "server"]


async def test_a_closed_bus_refuses_everything(open_bus: OpenBus) -> None:
    closed = await open_bus("closed")
    bucket = await closed.kv("bucket")
    objects = await closed.objects()
    await closed.__aexit__(None, None, None)
    with pytest.raises(BusError, match="not open"):
        await closed.publish("subject", numbered(0))
    with pytest.raises(BusError, match="not open"):
        await closed.request("subject", numbered(0), Ok, timeout=WAIT_S)
    with pytest.raises(BusError, match="not open"):
        await closed.subscribe("subject", On(Message, Collector()))
    with pytest.raises(BusError, match="not open"):
        await closed.serve("subject", Cancel, echo)
    with pytest.raises(BusError, match="not open"):
        await bucket.get("key")
    with pytest.raises(BusError, match="not open"):
        await objects.put(b"data")
    with pytest.raises(BusError, match="not open"):
        await anext(aiter(bucket.watch()))


async def test_messages_published_before_closing_arrive(open_bus: OpenBus, bus: Bus) -> None:
    heard = Collector()
    await bus.subscribe("subject", On(Message, heard))
    leaving = await open_bus("leaving")
    for i in range(100):
        await leaving.publish("subject", numbered(i))
    await leaving.__aexit__(None, None, None)
    assert await heard.take(100) == [numbered(i) for i in range(100)]
