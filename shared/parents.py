"""Processes that end with those that started them."""

import ctypes
import os
import signal
from collections.abc import Callable
from functools import partial

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the thread of `parent` that started it ends."""
    _die_with(_libc(), parent)


def die_with_parent() -> Callable[[], None]:
    """Returns a `preexec_fn` for Popen. The kernel kills the child when the thread that started it
    ends.

    Safe with threads: it makes system calls only.
    """
    return partial(_die_with, _libc(), os.getpid())


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _die_with(libc: ctypes.CDLL, parent: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        os._exit(1)


def outlive_parent() -> None:
    """Undoes `die_with_parent` in the process that called it."""
    _libc().prctl(_PR_SET_PDEATHSIG, 0)
