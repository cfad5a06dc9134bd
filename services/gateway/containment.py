"""The boundary that keeps what goes wrong with one request, model or message to itself."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from shared.errors import LambdaScaleError

AFTER_FAILURE_S = 1.0
"""Seconds until a failed step is tried again, so that a bug does not fill the log."""


async def failure_of(
    work: Awaitable[object], log: structlog.stdlib.BoundLogger, what: str
) -> LambdaScaleError | None:
    """The error with which `work` ended; None if it went well. Only cancelling the caller's own
    task passes through.

    An untyped error is a bug, or comes from foreign code: it is logged, and its text stays here.
    """
    try:
        await work
    except LambdaScaleError as error:
        return error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The awaited work was cancelled, not this task.
        return LambdaScaleError(f"{what} was given up")
    except Exception:  # the supervised boundary of what the gateway calls
        log.exception("call failed", what=what)
        return LambdaScaleError(f"{what} failed; the gateway's log says why")
    return None


async def go_on(
    step: Callable[[], Awaitable[float | None]], log: structlog.stdlib.BoundLogger, what: str
) -> None:
    """Takes the step again and again, each time after the seconds that it returns. None ends it."""

    pause: float | None = 0.0

    async def take() -> None:
        nonlocal pause
        pause = await step()

    while pause is not None:
        await asyncio.sleep(pause)
        pause = AFTER_FAILURE_S
        if error := await failure_of(take(), log, what):
            log.debug("step failed", what=what, error=str(error))
