"""The two clocks. Code that waits or measures uses `now`; only records for people use `wall_ns`.

`now` is the running loop's clock, so that a virtual-time loop is obeyed everywhere.
"""

import asyncio
import time


def now() -> float:
    """Seconds on the running event loop's clock."""
    return asyncio.get_running_loop().time()


def wall_ns() -> int:
    """Nanoseconds since the epoch, comparable between the processes of a cluster."""
    return time.time_ns()
