"""The two clocks. Code that waits or measures uses `now`; only records for people use `wall_ns`.

`now` is the running loop's clock, so that a virtual-time loop is obeyed everywhere.
"""

import asyncio
import time
from collections.abc import Callable

wall_source: Callable[[], int] = time.time_ns
"""Replaced where time is virtual (`simulation/loop.py`)."""


def now() -> float:
    """Seconds on the running event loop's clock."""
    return asyncio.get_running_loop().time()


def wall_ns() -> int:
    """Nanoseconds since the epoch, comparable between the processes of a cluster."""
    return wall_source()
