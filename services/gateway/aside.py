"""Threads for work that takes long, beside the loop, whose thread goes first."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

THREADS = 2
"""How much is done at a time. The rest waits, in the order in which it came."""
NICE = 10
"""How much the scheduler prefers the loop's thread where processors are short."""
P = ParamSpec("P")
T = TypeVar("T")


def _step_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aside", initializer=_step_back)


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function returns. If the caller is cancelled, the function goes on."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, lambda: function(*args, **kwargs))
