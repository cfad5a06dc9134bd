"""Where a bug ends: at the boundary around one handler, one request, one model or one node.

Inside a boundary whatever is raised is logged and counted, and all other work goes on.
"""

import asyncio


def is_containable(error: BaseException) -> bool:
    """Whether a boundary may keep the error to itself.

    What ends the process, or the running task, must pass. A CancelledError of a task that nobody
    cancelled is a bug like any other: something that the task awaited was cancelled by others.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() == 0
    return isinstance(error, Exception)
