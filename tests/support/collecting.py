"""The processes of a run collect the same tests. In a new checkout the first of them compiles what
all import, with pytest's assertions, and the others wait and find it compiled."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DONE = "collected"


@contextmanager
def in_turn(run: str) -> Iterator[None]:
    """`run`: the id of the run. If the first process dies, the next one takes its place."""
    with _file(run).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read() == _DONE:
            fcntl.flock(file, fcntl.LOCK_UN)
            yield
            return
        yield
        file.write(_DONE)


def forget(run: str) -> None:
    _file(run).unlink(missing_ok=True)


def _file(run: str) -> Path:
    return Path(tempfile.gettempdir()) / f"lambdascale-tests-{run}"
