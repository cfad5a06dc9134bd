"""The lifecycle that every service has: what opens, runs, fails and closes, and in which order."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import structlog
import uvloop

from shared import telemetry
from shared.service import Service, log_what_nobody_awaits, serve_until_signal
from tests.support.malformed import ERRORS

WAIT_S = 100.0


class Broken(Exception):
    pass


class Recorder(Service):
    """A service that writes down what happens to it, with two resources and one task."""

    role = "recorder"
    drain_s = WAIT_S

    def __init__(self) -> None:
        super().__init__("recorder-0")
        self.story: list[str] = []
        self.fail = asyncio.Event()
        self.fails_with: BaseException = Broken("task")

    async def open(self) -> None:
        self.story.append("open")
        await self.resources.enter_async_context(self.resource("first"))
        await self.resources.enter_async_context(self.resource("second"))
        self.spawn(self.work(), name="work")

    async def drain(self) -> None:
        self.story.append("drain")

    @asynccontextmanager
    async def resource(self, name: str) -> AsyncIterator[None]:
        self.story.append(f"+{name}")
        try:
            yield
        finally:
            await asyncio.sleep(0)
            self.story.append(f"-{name}")

    async def work(self) -> None:
        try:
            await self.fail.wait()
            raise self.fails_with
        finally:
            await asyncio.sleep(0)
            self.story.append("work ended")


OPENED = ["open", "+first", "+second"]
CLOSED = ["work ended", "-second", "-first"]


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_service_drains_then_ends_its_tasks_then_closes_in_reverse() -> None:
    service = Recorder()
    async with service:
        await asyncio.sleep(0)
        assert service.story == OPENED
    assert service.story == [*OPENED, "drain", *CLOSED]


async def run(service: Service, body: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.timeout(WAIT_S), service:
        await asyncio.sleep(0)
        await body()


async def test_a_task_that_fails_ends_the_service_with_its_error() -> None:
    service = Recorder()

    async def body() -> None:
        service.fail.set()
        await forever()

    with pytest.raises(Broken, match="task"):
        await run(service, body)
    assert service.story == [*OPENED, *CLOSED]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_failure_is_not_lost_on_a_body_that_ignores_being_cancelled() -> None:
    service = Recorder()

    async def body() -> None:
        service.fail.set()
        with suppress(asyncio.CancelledError):
            await forever()

    with pytest.raises(Broken, match="task"):
        await run(service, body)
    assert service.story[-2:] == ["-second", "-first"]


async def test_a_task_that_fails_while_draining_ends_the_service_with_its_error() -> None:
    class Draining(Recorder):
        async def drain(self) -> None:
            self.fail.set()
            await forever()

    service = Draining()
    with pytest.raises(Broken, match="task"):
        async with asyncio.timeout(WAIT_S), service:
            await asyncio.sleep(0)
    assert service.story == [*OPENED, *CLOSED]


async def test_a_task_that_fails_while_opening_ends_the_service_with_its_error() -> None:
    class Opening(Recorder):
        async def open(self) -> None:
            await super().open()
            self.fail.set()
            await forever()

    service = Opening()
    with pytest.raises(Broken, match="task"):
        async with asyncio.timeout(WAIT_S):
            await service.__aenter__()
    assert service.story == [*OPENED, *CLOSED]


async def test_a_task_that_fails_at_its_end_fails_the_service() -> None:
    class Ending(Recorder):
        async def work(self) -> None:
            try:
                await forever()
            finally:
                raise Broken("at the end")

    service = Ending()
    with pytest.raises(Broken, match="at the end"):
        async with service:
            await asyncio.sleep(0)
    assert service.story[-2:] == ["-second", "-first"]


async def test_a_contained_failure_ends_its_own_work_only() -> None:
    service = Recorder()

    async def fail(error: BaseException) -> None:
        raise error

    async with service:
        for error in ERRORS:
            service.spawn(fail(error), name="one item", contained=True)
            with service.contain("a tick", model="llama"):
                raise error
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert service.failures == 2 * len(ERRORS)


async def test_what_is_told_to_end_is_not_contained() -> None:
    service = Recorder()
    reached: list[str] = []

    async def work() -> None:
        with service.contain("a tick"):
            reached.append("begun")
            await forever()
        reached.append("went on")

    async with asyncio.timeout(WAIT_S), service:
        service.spawn(work(), name="tick")
        await asyncio.sleep(0)
    assert (reached, service.failures) == (["begun"], 0)


async def test_a_task_that_ends_because_another_was_cancelled_has_failed() -> None:
    service = Recorder()

    async def work() -> None:
        awaited = asyncio.get_running_loop().create_future()
        awaited.cancel()
        await awaited

    async def waiting() -> None:
        service.spawn(work(), name="tick")
        await forever()

    with pytest.raises(RuntimeError, match="recorder-0/tick: something that it awaited was cancel"):
        await run(service, waiting)


def test_a_name_that_is_looked_up_in_vain_is_no_raw_text_in_the_log() -> None:
    """uvloop goes on with a lookup whose caller gave up, and its error reaches nobody."""

    async def work() -> None:
        log_what_nobody_awaits(telemetry.logger("test"))
        attempt = asyncio.create_task(asyncio.open_connection("127.0.0.1", "no-such-service"))
        await asyncio.sleep(0)  # it looks the name of the port up, which needs no network
        attempt.cancel()
        del attempt  # its lookup's error is reported when nobody can ask for it any more
        async with asyncio.timeout(WAIT_S):
            while not any("looked up in vain" in str(entry["event"]) for entry in entries):
                gc.collect()
                await asyncio.sleep(0.01)

    with structlog.testing.capture_logs() as entries:
        uvloop.run(work())
    assert not [entry for entry in entries if entry["log_level"] == "error"]


async def test_the_first_of_several_failures_is_raised() -> None:
    service = Recorder()

    async def fail_later() -> None:
        try:
            await forever()
        finally:
            raise Broken("later")

    async def body() -> None:
        service.spawn(fail_later(), name="later")
        await asyncio.sleep(0)
        service.fail.set()
        await forever()

    with pytest.raises(Broken, match="task"):
        await run(service, body)


async def test_a_task_that_ends_by_itself_is_no_failure() -> None:
    service = Recorder()
    async with service:
        await service.spawn(asyncio.sleep(0), name="short")
    assert service.story == [*OPENED, "drain", *CLOSED]


async def test_an_open_that_fails_closes_what_it_opened_and_raises_its_own_error() -> None:
    class Opening(Recorder):
        async def open(self) -> None:
            await super().open()
            await asyncio.sleep(0)
            raise Broken("open")

    service = Opening()
    with pytest.raises(Broken, match="open"):
        await service.__aenter__()
    assert service.story == [*OPENED, *CLOSED]


async def test_a_body_that_fails_is_not_drained_and_raises_its_own_error() -> None:
    service = Recorder()

    async def body() -> None:
        raise Broken("body")

    with pytest.raises(Broken, match="body"):
        await run(service, body)
    assert service.story == [*OPENED, *CLOSED]


async def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    class Draining(Recorder):
        drain_s = 0.01

        async def drain(self) -> None:
            await forever()

    service = Draining()
    async with asyncio.timeout(WAIT_S), service:
        await asyncio.sleep(0)
    assert service.story == [*OPENED, *CLOSED]


@pytest.mark.parametrize("error", [Broken("drain"), TimeoutError("a timeout of its own")])
async def test_a_drain_that_fails_still_closes_everything(error: Exception) -> None:
    class Draining(Recorder):
        async def drain(self) -> None:
            raise error

    service = Draining()
    with pytest.raises(type(error)) as caught:
        async with service:
            await asyncio.sleep(0)
    assert caught.value is error
    assert service.story == [*OPENED, *CLOSED]


async def test_cancelling_the_owner_closes_everything_and_stays_a_cancellation() -> None:
    service = Recorder()
    entered = asyncio.Event()

    async def body() -> None:
        entered.set()
        await forever()

    task = asyncio.ensure_future(run(service, body))
    await entered.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.story == [*OPENED, *CLOSED]


async def test_a_timeout_around_a_service_is_a_timeout() -> None:
    service = Recorder()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), service:
            await forever()
    assert service.story == [*OPENED, *CLOSED]


async def test_tasks_spawned_while_closing_end_too() -> None:
    class Late(Recorder):
        ended = False

        async def open(self) -> None:
            await super().open()
            self.resources.push_async_callback(self.spawn_one)

        async def spawn_one(self) -> None:
            self.spawn(self.late(), name="late")
            await asyncio.sleep(0)

        async def late(self) -> None:
            try:
                await forever()
            finally:
                self.ended = True

    service = Late()
    async with service:
        await asyncio.sleep(0)
    assert service.ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_service_runs_until_a_signal(number: signal.Signals) -> None:
    service = Recorder()
    before = signal.getsignal(number)

    async def tell() -> None:
        os.kill(os.getpid(), number)

    class Signalled(Recorder):
        async def open(self) -> None:
            await super().open()
            self.spawn(tell(), name="tell")

    service = Signalled()
    async with asyncio.timeout(WAIT_S):
        await serve_until_signal(service)
    assert service.story == [*OPENED, "drain", *CLOSED]
    assert signal.getsignal(number) in (before, signal.default_int_handler, signal.SIG_DFL)


async def test_a_service_that_stops_itself_ends_as_after_a_signal() -> None:
    class Leaves(Recorder):
        async def open(self) -> None:
            await super().open()
            self.spawn(self.leave(), name="leave")

        async def leave(self) -> None:
            self.stop.set()

    service = Leaves()
    async with asyncio.timeout(WAIT_S):
        await serve_until_signal(service)
    assert service.story == [*OPENED, "drain", *CLOSED]


async def test_a_signal_ends_a_service_that_still_opens() -> None:
    class StandsBy(Recorder):
        async def open(self) -> None:
            await super().open()
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            await forever()

    service = StandsBy()
    async with asyncio.timeout(WAIT_S):
        await serve_until_signal(service)
    assert service.story == [*OPENED, *CLOSED]
    await asyncio.sleep(0)  # no cancellation is left over


async def test_a_failure_ends_a_service_that_waits_for_a_signal() -> None:
    service = Recorder()
    service.fail.set()
    with pytest.raises(Broken):
        async with asyncio.timeout(WAIT_S):
            await serve_until_signal(service)
