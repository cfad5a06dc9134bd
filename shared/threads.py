"""Work in threads. Cancelling the task that waits for a thread does not stop the thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


def begun(function: Callable[[], None], executor: Executor | None = None) -> "asyncio.Future[None]":
    """Runs `function` in a thread from now on. Whoever begins it must wait until it has `ended`."""
    return asyncio.get_running_loop().run_in_executor(executor, function)


async def ended(work: "asyncio.Future[None]") -> None:
    """Waits for the thread that does the work. Even if it is cancelled, however often, it returns
    only when the thread has ended, because the data that the thread works on must not be taken away
    meanwhile."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    error = work.exception()
    if cancelled:
        raise asyncio.CancelledError
    if error is not None:
        raise error


async def to_its_end(function: Callable[[], None], executor: Executor | None = None) -> None:
    """Runs `function` in a thread, and waits until it has `ended`."""
    await ended(begun(function, executor))
