"""One connection to NATS that is kept up for as long as its bus is open.

nats-py reconnects by itself, but it gives up for good when the server sends an error that it does
not know. A new client then takes over with the same subscriptions.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from random import random
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.js.api import StreamInfo

from shared.bus.delivery import Tasks
from shared.bus.nats_client import PromptClient
from shared.bus.nats_ends import address_of, check_payload, check_version, identity_of, version_of
from shared.config import BusConfig
from shared.errors import BusError, BusTimeout, CutOff, NoResponders, NotPermitted

CALL_TIMEOUT_S = 5.0
_RECONNECT_WAIT_S = 0.2
_ANSWER_S = 1.0
_NO_LEADER_S = 0.02
LEADER_S = 30.0
"""How long to wait for an answer about a bucket. NATS servers that form a cluster give none while
they elect a leader, which takes 4 to 9 s."""
_TOO_FEW_SERVERS = 10005
"""JetStream's error code where a stream's copies need more servers than it has heard of yet."""
_PING_S = 1
_LOST_PINGS = 2
"""A server that does not answer this many pings is left for another server, or connected to
anew. So one that hangs is left within 4 s."""
_CONNECT_S = 1
_VIOLATION = re.compile('permissions violation for (publish|subscription) to "([^"]*)"')
"""What NATS says, in the client's lower case, when a user does what its role may not."""

T = TypeVar("T")
Receive = Callable[[Msg], Awaitable[None]]


class NatsSubscription:
    def __init__(
        self, connection: "Connection", subject: str, queue: str, receive: Receive
    ) -> None:
        self.subject = subject
        self._connection = connection
        self._queue = queue
        self._receive = receive
        self._bound: Any = None

    async def bind(self, client: Client) -> None:
        self._bound = await client.subscribe(self.subject, queue=self._queue, cb=self._receive)

    async def close(self) -> None:
        self._connection.forget(self)
        try:
            await self._bound.unsubscribe()
        except nats.errors.Error as error:  # the connection is gone, and the subscription with it
            self._connection.log.debug("unsubscribe", subject=self.subject, error=str(error))


class _Call:
    """One exchange with the server, while it lasts."""

    scope: asyncio.Timeout
    refused = False
    """Whether NATS does not permit it."""
    dies = False
    """Whether it ends with the connection."""
    lost = False
    """Whether it ended so."""
    cut_off = False
    """Whether there was no connection for some of the time."""

    def __init__(self, subjects: tuple[str, ...]) -> None:
        """`subjects`: what it publishes or subscribes to."""
        self.subjects = subjects

    def end(self) -> None:
        if not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())


class Connection:
    def __init__(self, config: BusConfig, name: str, log: structlog.stdlib.BoundLogger) -> None:
        self.log = log
        self.client: Client = None
        self.jetstream: Any = None
        self.on_change: set[Callable[[], None]] = set()
        """Called when a broken connection is up again, and when the bus closes."""
        self._config = config
        self._name = name
        self._tasks = Tasks()
        self._up = asyncio.Event()
        self._open = False
        self._calls: set[_Call] = set()
        self._subscriptions: set[NatsSubscription] = set()
        self._last_error: Exception | None = None
        self._opening = False
        self._server = ""
        """The address of the server that it is, or was last, connected to."""

    async def open(self) -> None:
        timeout = self._config.connect_timeout_s
        self._opening = True
        try:
            with _cancellation_kept():
                async with asyncio.timeout(timeout):
                    client = await self._connect()
        except TimeoutError as error:
            raise BusError(
                f"no NATS server at {self._config.url} within {timeout} s{self._why()}: "
                "start one, or set bus.url"
            ) from error
        finally:
            self._opening = False
        self._use(client)
        try:
            check_version(version_of(client))
            check_payload(client.max_payload)
        except BusError:
            await self.close()
            raise
        self._open = True

    def _why(self) -> str:
        """The client's last error in brackets, where it had one that says something."""
        said = str(self._last_error or "")
        return f" ({said})" if said else ""

    async def close(self) -> None:
        """Sends what is buffered, and ends every call in progress with BusError."""
        self._open = False
        for call in self._calls:
            call.end()
        self._announce()
        await self._tasks.close()
        await self._close_client(self.client)

    @property
    def is_up(self) -> bool:
        return self._open and self._up.is_set()

    def check_open(self) -> None:
        if not self._open:
            raise BusError(f"{self._name}: the bus is not open")

    @asynccontextmanager
    async def call(
        self, what: str, timeout: float = CALL_TIMEOUT_S, on: tuple[str, ...] = ()
    ) -> AsyncIterator[None]:
        """Wraps one exchange with the server: it begins when connected, never hangs, and raises
        typed errors: NotPermitted at once if NATS refuses what is said or heard `on` a subject,
        CutOff if no answer came and there was no connection for some of the time.

        If the connection is lost, a call of up to CALL_TIMEOUT_S ends at once: its answer would be
        there in a moment, so it is lost as well, and the caller can ask again. The answer to a
        longer call may still come over the next connection.
        """
        self.check_open()
        call = _Call(tuple(subject.lower() for subject in on))
        call.cut_off = not self._up.is_set()
        try:
            with _cancellation_kept():
                async with asyncio.timeout(timeout) as call.scope:
                    self._calls.add(call)
                    try:
                        await self._up.wait()
                        call.dies = timeout <= CALL_TIMEOUT_S
                        yield
                    finally:
                        self._calls.discard(call)
            if call.refused:
                raise _not_permitted(what)
        except TimeoutError as error:
            self.check_open()
            if call.refused:
                raise _not_permitted(what) from error
            if call.lost:
                why = "the connection to NATS was lost before an answer came"
            else:
                state = "no answer" if self._up.is_set() else "not connected to NATS"
                why = f"{state} within {timeout} s"
            raise (CutOff if call.cut_off else BusTimeout)(f"{what}: {why}") from error
        except (
            nats.errors.NoRespondersError,
            nats.js.errors.NoStreamResponseError,
            nats.js.errors.ServiceUnavailableError,
        ) as error:
            raise NoResponders(f"{what}: nobody answers") from error
        except nats.errors.Error as error:
            self.check_open()
            if isinstance(error, nats.js.errors.APIError) and error.err_code == _TOO_FEW_SERVERS:
                raise NoResponders(f"{what}: too few NATS servers are there") from error
            raise BusError(f"{what}: {error}") from error

    async def until_answered(
        self,
        what: str,
        on: tuple[str, ...],
        ask: Callable[[], Awaitable[T]],
        within_s: float = LEADER_S,
    ) -> T:
        """Asks the server `on` these subjects, again and again while its cluster has no leader.
        `ask` must do no harm when it is called twice. BusError if there is no answer for so long.

        Each time it waits longer, because a server that is busy does answer.
        """
        loop = asyncio.get_running_loop()
        deadline, patience = loop.time() + within_s, _ANSWER_S
        while True:
            async with self.call(what):
                pass  # the connection is up
            try:
                async with self.call(what, patience, on):
                    return await ask()
            except (BusTimeout, NoResponders):
                left = deadline - loop.time()
                if left <= 0:
                    raise
                patience = min(2 * patience, max(left, _ANSWER_S), CALL_TIMEOUT_S)
                await asyncio.sleep(_RECONNECT_WAIT_S)

    async def led(self, stream: str) -> StreamInfo:
        """The stream, once it has a leader. While the servers of a cluster make a stream it has
        none, and what is asked of it, or written, is never answered. NotFoundError if there is
        none."""
        while True:
            info = await self.jetstream.stream_info(stream)
            if info.cluster is None or info.cluster.leader:
                return info
            await asyncio.sleep(_NO_LEADER_S)

    async def led_new(self, stream: str) -> StreamInfo:
        """The same of a stream that was made just now: a server that has not heard of it yet says
        that there is none."""
        while True:
            try:
                return await self.led(stream)
            except nats.js.errors.NotFoundError:
                await asyncio.sleep(_NO_LEADER_S)

    async def subscribe(self, subject: str, receive: Receive, queue: str = "") -> NatsSubscription:
        """Subscribes. Once this returns, the server knows of it."""
        subscription = NatsSubscription(self, subject, queue, receive)
        try:
            async with self.call(f"subscribe {subject}", on=(subject,)):
                await subscription.bind(self.client)
                self._subscriptions.add(subscription)
                # The client writes a PING after everything that it still has to write. When the
                # first PING is answered the subscription is written; the answer to the second
                # comes after it.
                await self.client.flush()
                await self.client.flush()
        except NotPermitted:
            await subscription.close()
            raise
        return subscription

    def forget(self, subscription: NatsSubscription) -> None:
        self._subscriptions.discard(subscription)

    async def _connect(self) -> Client:
        identity = identity_of(self._config)
        client = PromptClient()
        try:
            await client.connect(
                servers=self._config.url.split(","),
                name=self._name,
                **identity,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,
                connect_timeout=_CONNECT_S,
                ping_interval=_PING_S,
                max_outstanding_pings=_LOST_PINGS,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                reconnect_to_server_handler=self._next_server,
            )
        except BaseException:
            await self._close_client(client)
            raise
        return client

    async def _close_client(self, client: Client) -> None:
        try:
            with _cancellation_kept():
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    if client.is_connected:
                        await client.flush()
                    await client.close()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            self.log.warning("NATS closed without sending everything", error=repr(error))

    def _use(self, client: Client) -> None:
        self.client = client
        self._server = address_of(client)
        self.jetstream = client.jetstream(timeout=CALL_TIMEOUT_S)
        self._up.set()

    def _announce(self) -> None:
        for change in list(self.on_change):
            change()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if self._opening and "authorization violation" in str(error).lower():
            config = self._config
            given = f"the key in {config.credentials}" if config.credentials else "no credentials"
            raise BusError(  # out of the client's connect: trying again would change nothing
                f"NATS at {config.url} refuses a client with {given}: set bus.credentials to a "
                "directory that `lambdascale init` made for this cluster"
            )
        if violation := _VIOLATION.search(str(error)):
            self._on_violation(*violation.groups())
            return
        if self._up.is_set():
            self.log.warning("NATS error", error=repr(error))

    def _on_violation(self, what: str, subject: str) -> None:
        self.log.error("NATS does not permit this", what=what, subject=subject)
        for call in self._calls:
            if subject in call.subjects:
                call.refused = True
                call.end()

    async def _on_disconnected(self) -> None:
        if self._open and self._up.is_set():
            self._up.clear()
            self.log.warning("NATS disconnected", error=repr(self._last_error))
            for call in self._calls:
                call.cut_off = True
                if call.dies:
                    call.lost = True
                    call.end()

    async def _on_reconnected(self) -> None:
        self._server = address_of(self.client)
        self._up.set()
        self.log.info("NATS reconnected", server=version_of(self.client))
        self._announce()

    def _next_server(self, servers: list[Server], _: object) -> tuple[Server, float]:
        """The server to try next, and after how many seconds: that which failed least often, and
        the server that was lost only after the others."""
        server = min(servers, key=lambda s: (s.reconnects, s.uri.netloc == self._server, random()))
        return server, _RECONNECT_WAIT_S if server.reconnects else 0.0

    async def _on_closed(self) -> None:
        if self._open:
            self._tasks.spawn(self._replace_client(), name=f"{self._name}/reconnect")

    async def _replace_client(self) -> None:
        self.log.error("NATS closed the connection", error=repr(self.client.last_error))
        client = await self._connect()
        for subscription in list(self._subscriptions):
            await subscription.bind(client)
        self._use(client)
        self.log.info("NATS connected anew", server=version_of(client))
        self._announce()


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """nats-py awaits with asyncio.wait_for, which (until Python 3.12) loses a cancellation that
    comes together with the answer. A task that was told to end would then go on for ever."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


def opening(stream: str) -> tuple[str, ...]:
    """What is asked to find the stream of a bucket, or to make it."""
    return f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.CREATE.{stream}", "$JS.API.INFO"


def _not_permitted(what: str) -> NotPermitted:
    return NotPermitted(f"{what}: NATS does not permit this to the user of bus.credentials")
