"""Requests of an operator's program to a service. A failure names the service that does not
answer."""

from typing import TypeVar

from shared.bus.base import Bus
from shared.errors import BusError, BusTimeout, NoResponders
from shared.messages import Message

TIMEOUT_S = 5.0
M = TypeVar("M", bound=Message)


async def ask(
    bus: Bus, subject: str, message: Message, reply: type[M], *, timeout: float = TIMEOUT_S
) -> M:
    """Sends a request. BusError names the service that does not answer."""
    try:
        return await bus.request(subject, message, reply, timeout=timeout)
    except (NoResponders, BusTimeout) as error:
        _, service, *name, _ = subject.split(".")
        who = " ".join((service, *name)) if name else f"the {service}"
        raise BusError(f"{who} does not answer: `lambdascale status` shows what runs") from error
