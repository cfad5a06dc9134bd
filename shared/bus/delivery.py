"""What both buses do alike: keys and lifetimes, decoding what arrives, running handlers."""

import asyncio
import re
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from shared import telemetry
from shared.bus.base import M, On, Server
from shared.containment import is_containable
from shared.errors import (
    BadInput,
    BadMessage,
    IllegalTransition,
    LambdaScaleError,
    MessageTooLarge,
    ServiceFailed,
    StaleEpoch,
)
from shared.messages import ErrorReply, Message, Ok, Ping, decode, encode
from shared.permissions import Role, topic_of

MAX_PAYLOAD = 8 << 20
"""The most bytes of a message or a KV value. The state of a pool of some thousand nodes fits.
nats-server has to be told (`max_payload`), because its default is 1 MiB."""
INBOX_LIMIT = 1 << 16
"""The most messages that wait for one handler. Further messages are dropped and counted."""

_KEY = re.compile(r"[-/_=A-Za-z0-9]+(\.[-/_=A-Za-z0-9]+)*")


def check_key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise BadInput(f"key {key!r} is not valid: dot-separated names of letters, digits, '-/_='")
    return key


def check_ttl(ttl: float) -> int:
    if ttl < 1 or ttl != int(ttl):
        raise BadInput(f"time to live {ttl} s: use a whole number of seconds, at least 1")
    return int(ttl)


def check_size(data: bytes, what: str) -> bytes:
    if len(data) > MAX_PAYLOAD:
        raise MessageTooLarge(f"{what}: {len(data)} bytes, the limit is {MAX_PAYLOAD}")
    return data


class Tasks:
    """Tasks with one owner, who ends them all when it closes."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], None] = {}
        """The tasks that run, the oldest first. (A dict, because a set has no order.)"""
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Runs `work` until it ends or `close` cancels it; after `close`, not at all."""
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)

    async def close(self) -> None:
        self._closed = True
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Delivery:
    """Runs handlers so that nothing that arrives, and nothing they raise, breaks a bus."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = telemetry.logger("bus", name=name)
        self.tasks = Tasks()
        self.rejected = 0
        """Messages that were malformed, and requests of a kind that their subject does not take."""
        self.ignored = 0
        """Broadcasts of a kind that their subscriber has no handler for."""
        self.failed = 0
        """Calls of handlers that raised: any error for a broadcast, and an untyped error for a
        request."""
        self.dropped = 0
        """Messages lost because their handler was too slow."""
        self.stale = 0
        """Messages of processes that are no longer the active ones of their role."""
        self._terms: dict[str, int] = {}
        """The latest term that was heard, by role."""

    def inbox(self, subject: str, handlers: tuple[On[Any], ...]) -> "Inbox":
        """Makes an inbox, and starts the task that gives its messages to the handlers."""
        inbox = Inbox(self, subject)
        self.tasks.spawn(inbox.work_off(handlers), name=f"{self.name}/{subject}")
        return inbox

    async def handle(self, subject: str, handlers: tuple[On[Any], ...], data: bytes) -> None:
        try:
            message = self._admit(subject, self._decode(subject, data))
        except (BadMessage, StaleEpoch) as error:
            self.log.warning("message dropped", subject=subject, error=str(error))
            return
        try:
            for on in handlers:
                if isinstance(message, on.kind):
                    await on.handler(message)
                    return
            self.ignored += 1
        except BaseException as error:  # the supervised boundary of all handlers
            if not is_containable(error):
                raise
            self.failed += 1
            self.log.error("handler failed", subject=subject, exc_info=error)

    async def answer(self, subject: str, kind: type[M], server: Server[M], data: bytes) -> bytes:
        try:
            message = self._admit(subject, self._decode(subject, data))
            reply: Message = Ok()
            if not isinstance(message, Ping):
                if not isinstance(message, kind):
                    self.rejected += 1
                    raise BadMessage(
                        f"{subject} takes {kind.__name__}, not {type(message).__name__}"
                    )
                reply = await server(message)
            return check_size(encode(reply), f"reply on {subject}")
        except BaseException as error:  # the supervised boundary of all servers
            if not is_containable(error):
                raise
            return encode(ErrorReply.of(self._refusal(subject, error)))

    def expect(self, subject: str, data: bytes, kind: type[M]) -> M:
        """The reply in `data`, or raises the error that it carries."""
        reply = self._admit(subject, self._decode(subject, data), answer=True)
        if isinstance(reply, ErrorReply):
            raise reply.error()
        if not isinstance(reply, kind):
            self.rejected += 1
            raise BadMessage(
                f"{subject} answered with {type(reply).__name__}, expected {kind.__name__}"
            )
        return reply

    def _refusal(self, subject: str, error: BaseException) -> LambdaScaleError:
        """What the requester is told: a typed error as it is, a bug as ServiceFailed."""
        if isinstance(error, LambdaScaleError) and not isinstance(error, IllegalTransition):
            self.log.debug("request refused", subject=subject, error=str(error))
            return error
        self.failed += 1
        self.log.error("server failed", subject=subject, exc_info=error)
        return ServiceFailed(f"{self.name} failed: {error!r}")

    def _admit(self, subject: str, message: Message, *, answer: bool = False) -> Message:
        """The message without its term, which handlers need not know. `answer`: it answers a
        request on the subject. StaleEpoch if its sender speaks for a role that a later process has,
        BadMessage if that role does not speak there.

        Only where no other role may speak does a later term count. Elsewhere any of them could say
        that another's term is over.
        """
        term = message.term
        if term is None:
            return message
        topic = topic_of(subject)
        speakers = frozenset[Role]() if topic is None else topic.hears if answer else topic.says
        if term.role not in speakers:
            self.rejected += 1
            raise BadMessage(
                f"{subject}: a message in a term of the {term.role} does not belong here"
            )
        latest = self._terms.get(term.role, 0)
        if term.number < latest:
            self.stale += 1
            raise StaleEpoch(
                f"a {term.role} of term {term.number} spoke, and term {latest} has begun"
            )
        if len(speakers) == 1:
            self._terms[term.role] = term.number
        return msgspec.structs.replace(message, term=None)

    def _decode(self, subject: str, data: bytes) -> Message:
        try:
            return decode(data)
        except BadMessage as error:
            self.rejected += 1
            raise BadMessage(f"{subject}: {error}") from error


class Inbox:
    """Messages for one handler, which gets them one after the other."""

    def __init__(self, delivery: Delivery, subject: str) -> None:
        self._delivery = delivery
        self._subject = subject
        self._waiting: deque[bytes] = deque()
        self._asleep: asyncio.Future[None] | None = None
        """What the task waits for while there is nothing to do."""
        self._closed = False

    def put(self, data: bytes) -> None:
        if len(self._waiting) == INBOX_LIMIT:
            self._delivery.dropped += 1
            self._delivery.log.error("message dropped: slow handler", subject=self._subject)
            return
        self._waiting.append(data)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._asleep is not None and not self._asleep.done():
            self._asleep.set_result(None)

    async def work_off(self, handlers: tuple[On[Any], ...]) -> None:
        while not self._closed:
            if self._waiting:
                await self._delivery.handle(self._subject, handlers, self._waiting.popleft())
            else:
                self._asleep = asyncio.get_running_loop().create_future()
                await self._asleep
