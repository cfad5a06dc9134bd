"""A C compiler that is quick, for tests in which processes compile and run no kernel."""

import os
import shutil
from pathlib import Path

QUICKLY = "-O0"
"""Four times as quick to compile."""


def quick_compiler(directory: Path) -> str:
    """Makes the directory, with a `cc` that writes a line to the file `ran` there whenever it runs.
    Returns a PATH that begins with the directory."""
    real = shutil.which("cc")
    assert real is not None, "no C compiler here"
    directory.mkdir()
    script = directory / "cc"
    script.write_text(f'#!/bin/sh\necho ran >> "{directory}/ran"\nexec "{real}" "$@" {QUICKLY}\n')
    script.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"
