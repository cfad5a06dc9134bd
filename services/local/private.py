"""Files and directories that nobody but their owner can read."""

import os
from pathlib import Path

_DIRECTORY = 0o700
_FILE = 0o600


def private_directory(path: Path) -> None:
    """Makes it, if it is not there, so that its owner alone gets in; also one that is there."""
    path.mkdir(parents=True, exist_ok=True, mode=_DIRECTORY)
    path.chmod(_DIRECTORY)


def write_private(path: Path, text: str) -> None:
    """Writes a file that its owner alone may read, in one step."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.rename(path)
