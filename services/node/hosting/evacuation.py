"""A node that is told to stop stays until others have taken over what it serves, and another
machine has what only its disk holds."""

import asyncio
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from services.node.hosting.library import REGISTRY_TIMEOUT_S
from shared import subjects
from shared.bus.base import Bus
from shared.clock import now
from shared.errors import LambdaScaleError
from shared.messages.copies import Leave, MayLeave

POLL_S = 0.2


async def evacuate(bus: Bus, leave: Leave, running: Callable[[], int], log: BoundLogger) -> None:
    """Returns when the registry says that the node may go and no request runs there any more, when
    the registry does not answer, or when the time that the node waits at most is over."""
    end = now() + leave.within_s
    while now() < end:
        try:
            answer = await bus.request(
                subjects.REGISTRY_LEAVE, leave, MayLeave, timeout=REGISTRY_TIMEOUT_S
            )
        except LambdaScaleError as error:
            log.warning("leaves unasked", error=str(error))
            return
        if not (answer.waits_for or running()):
            return
        log.info("stays", for_copies_of=answer.waits_for, running=running())
        await asyncio.sleep(POLL_S)
    if leave.within_s:
        log.warning("leaves before others have taken over", waited_s=leave.within_s)
