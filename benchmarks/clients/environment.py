"""An environment for each suite, made once."""

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

DONE = "made"
"""A file that says that an environment is complete."""


def bin_of(packages: Sequence[str]) -> Path:
    """The folder with the programs of an environment that has these packages. Makes it under the
    user's cache if it is not there. CalledProcessError if they cannot be installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = re.sub(r"[^\w.=-]+", "-", "+".join(packages))
    directory = cache / "lambdascale" / "clients" / name
    if not (directory / DONE).exists():
        shutil.rmtree(directory, ignore_errors=True)
        print(f"installing {', '.join(packages)} in {directory}", file=sys.stderr, flush=True)
        venv.create(directory, with_pip=True)
        pip = [str(directory / "bin/python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (directory / DONE).touch()
    return directory / "bin"
