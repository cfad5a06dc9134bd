"""Figures measured in a process of their own. A failure or a hang there, or a spoiled device, costs
no figure that was told before."""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

Figures = Callable[[str, str, int], Iterator[tuple[str, float]]]
"""(shape, device, runs)."""


def measured(
    figures: Figures, shape: str, device: str, runs: int, limit_s: float
) -> Iterator[tuple[str, float] | str]:
    """The figures, as the process tells them; last, if it did not come to its end, the reason."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(figures, shape, device, runs, theirs))
    process.start()
    theirs.close()
    deadline = time.monotonic() + limit_s
    try:
        while True:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                yield f"not at its end after {limit_s:.0f} s"
                return
            told = ours.recv()
            if told is None:
                return
            yield told
            if isinstance(told, str):
                return
    except EOFError:
        process.join()
        yield f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _tell(figures: Figures, shape: str, device: str, runs: int, to: Connection) -> None:
    sys.stdout = sys.stderr  # logs are not among the figures
    try:
        for figure in figures(shape, device, runs):
            to.send(figure)
    except Exception as error:  # told, with where it was raised
        traceback.print_exc()
        to.send(f"{type(error).__name__}: {error}"[:2000])
    else:
        to.send(None)
