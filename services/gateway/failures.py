"""Ways to await something whose failure concerns one request, model or message only.

`Contain` is `Service.contain`, which logs and counts the bugs that are raised inside it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import structlog

from shared.errors import LambdaScaleError

AFTER_FAILURE_S = 1.0
"""Seconds until a step that failed is taken again, so that a bug does not fill the log."""
Contain = Callable[[str], AbstractContextManager[None]]


async def failure_of(
    work: Awaitable[object], contain: Contain, what: str
) -> LambdaScaleError | None:
    """Awaits `work` and returns its error; None if there is none. The text of an untyped error
    stays in the log."""
    with contain(what):
        try:
            await work
        except LambdaScaleError as error:
            return error
        return None
    return LambdaScaleError(f"{what} failed; the gateway's log says why")


async def go_on(
    step: Callable[[], Awaitable[float | None]],
    contain: Contain,
    log: structlog.stdlib.BoundLogger,
    what: str,
) -> None:
    """Takes the step again and again. Each step returns the seconds until the next one, or None,
    which ends this."""
    pause: float | None = 0.0
    while pause is not None:
        await asyncio.sleep(pause)
        pause = AFTER_FAILURE_S
        with contain(what):
            try:
                pause = await step()
            except LambdaScaleError as error:
                log.debug("step failed", what=what, error=str(error))
