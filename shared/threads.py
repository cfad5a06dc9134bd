"""Work in threads. Cancelling the task that waits for a thread does not stop the thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

CHECK_STACK = 8 << 20
"""Stack in which a grammar is checked. Llguidance follows chains of rules by recursion, and a
process whose stack overflows dies."""


async def to_its_end(function: Callable[[], None], executor: Executor | None = None) -> None:
    """Runs `function` in a thread. Even if it is cancelled, however often, it returns only when the
    thread has ended, because the data that the thread works on must not be taken away meanwhile."""
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
