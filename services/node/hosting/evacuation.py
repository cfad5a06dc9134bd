"""A node that is told to stop stays until another machine has what only its disk holds."""

import asyncio

from structlog.stdlib import BoundLogger

from services.node.hosting.library import REGISTRY_TIMEOUT_S
from shared import subjects
from shared.bus.base import Bus
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.messages.copies import Leave, MayLeave

POLL_S = 0.2


async def evacuate(bus: Bus, leave: Leave, limit_s: float, log: BoundLogger) -> None:
    """Returns when the registry says that the node may go, does not answer, or after `limit_s`."""
    end = now() + limit_s
    while now() < end:
        try:
            answer = await bus.request(
                subjects.REGISTRY_LEAVE, leave, MayLeave, timeout=REGISTRY_TIMEOUT_S
            )
        except LambdaScaleError as error:
            log.warning("leaves unasked", error=str(error))
            return
        if not answer.waits_for:
            return
        log.info("stays for durable copies", models=answer.waits_for)
        await asyncio.sleep(POLL_S)
    if limit_s:
        log.warning("leaves with the only durable copy of a model", waited_s=limit_s)
