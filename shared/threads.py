"""Work in threads, which cancelling what waits for it does not stop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


async def to_its_end(function: Callable[[], None], executor: Executor | None = None) -> None:
    """Runs it in a thread. Also when cancelled, however often, it ends only when the thread has:
    what the thread is at must not be taken away under it, or left half done."""
    work = asyncio.get_running_loop().run_in_executor(executor, function)
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
