"""Files that are durable when a call returns, and errors of the disk by name."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shared.errors import CapacityExceeded, ModelError


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Creates `path` for writing. When the block has ended, its content is durable and no longer in
    the page cache, which direct reads would not use."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, data: bytes) -> None:
    with new_file(path) as file:
        file.write(data)


def fsync_directory(path: Path) -> None:
    """Makes the file names in the directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(root: Path, nbytes: int) -> None:
    """CapacityExceeded if the disk lacks room, rather than after hours of copying."""
    if shutil.disk_usage(root).free < nbytes:
        raise _no_room(root, nbytes)


@contextmanager
def disk_errors(root: Path, nbytes: int) -> Iterator[None]:
    """Turns an OSError into CapacityExceeded (disk full, quota) or ModelError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(root, nbytes) from error
        raise ModelError(f"{root}: cannot store the model: {error}") from error


def _no_room(root: Path, nbytes: int) -> CapacityExceeded:
    return CapacityExceeded(
        f"{root}: no room for a model of {nbytes} bytes; free some, or set node.data_dir to a "
        "larger disk"
    )
