"""Logs of processes that append to them and know of no rotation: the older half is put aside."""

import shutil
from pathlib import Path

LARGEST = 64 << 20
"""Bytes after which a log begins anew. What was there before is kept beside it, once."""


def put_aside(log: Path, largest: int = LARGEST) -> bool:
    """Moves what a log has to `LOG.1`, if it is more than `largest` bytes. Returns whether it did.

    The file itself stays, because its process has it open. A line that is written between the copy
    and the cut is lost. OSError if there is no room for the copy; nothing is lost then.
    """
    if not log.exists() or log.stat().st_size <= largest:
        return False
    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
    with log.open("r+b") as file:
        file.truncate()
    return True
