"""Compiles the C parts of a node (the engine's kernels, the data plane's relay loop) when they are
first needed, and keeps the results in the user's cache folder."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared.errors import LambdaScaleError


class CompileFailed(LambdaScaleError):
    """Says why there is no library."""

    code = "compile_failed"


def library(
    name: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]
) -> ctypes.CDLL:
    """The library of these sources, for this machine's processor. Takes seconds the first time."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise CompileFailed("there is no C compiler (cc): apt install gcc")
    try:
        compiled = _compiled(compiler, name, sources, headers, flags)
        try:
            return ctypes.CDLL(str(compiled))
        except OSError:
            compiled.unlink(missing_ok=True)
            raise
    except subprocess.CalledProcessError as error:
        raise CompileFailed(error.stderr) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise CompileFailed(str(error)) from error


def _compiled(
    compiler: str, name: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]
) -> Path:
    made_of = hashlib.sha256()
    for source in (*sources, *headers):
        made_of.update(source.read_bytes())
    made_of.update("\0".join((compiler, *flags, platform.machine(), _processor())).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lambdascale"
    compiled = folder / f"{name}-{made_of.hexdigest()[:16]}.so"
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Of processes that start together the first one compiles; the others wait for it.
        with (folder / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not compiled.exists():
                _compile(compiler, sources, flags, compiled)
    return compiled


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], compiled: Path) -> None:
    with tempfile.TemporaryDirectory(dir=compiled.parent) as own:
        made = Path(own) / "made.so"
        command = [compiler, *flags, *map(str, sources), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(compiled)


def _processor() -> str:
    """A description of everything that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
