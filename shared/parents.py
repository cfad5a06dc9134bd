"""Processes that end with those that started them."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread of `parent` that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        os._exit(1)


def die_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` for Popen. The kernel kills the child when the thread that started it
    ends.

    Safe with threads: it makes system calls only.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the request took effect
            os._exit(1)

    return in_child


def outlive_parent() -> None:
    """Undoes `die_with_parent` in the process that called it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)
