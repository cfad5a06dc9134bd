"""Compiles the C parts of a node (the engine's kernels, the data plane's relay loop) when they are
first needed, and keeps the results in the user's cache folder. What another node has compiled from
the same sources, if need be for the same processor, is taken from there (`artefacts`)."""

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
from typing import Protocol

from shared.errors import LambdaScaleError

FOR_THIS_PROCESSOR = "-march=native"
"""The flag of libraries that run only on processors like this machine's."""


class CompileFailed(LambdaScaleError):
    """Says why there is no library."""

    code = "compile_failed"


class Peers(Protocol):
    """Other nodes, which may have a library already. Called on threads that may wait."""

    def fetch(self, name: str) -> bytes | None:
        """The library of this file name. None: nobody has it."""

    def offer(self, path: Path) -> None:
        """The library at this path has been loaded, so others may have it."""


_peers: Peers | None = None


def use_peers(peers: Peers | None) -> None:
    """From now on libraries are taken from them and offered to them. None: from and to nobody."""
    global _peers
    _peers = peers


def library(
    name: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]
) -> ctypes.CDLL:
    """The library of these sources. Compiling takes seconds."""
    try:
        compiled = place(name, sources, headers, flags)
        if not compiled.exists():
            _provide(name, sources, flags, compiled)
        try:
            loaded = ctypes.CDLL(str(compiled))
        except OSError:
            compiled.unlink(missing_ok=True)
            raise
    except subprocess.CalledProcessError as error:
        raise CompileFailed(error.stderr) from error
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise CompileFailed(str(error)) from error
    if _peers is not None:
        _peers.offer(compiled)
    return loaded


def place(
    name: str, sources: Sequence[Path], headers: Sequence[Path], flags: Sequence[str]
) -> Path:
    """Where the library is kept. The file's name stands for all that it is made from and for."""
    made_of = hashlib.sha256()
    for source in (*sources, *headers):
        made_of.update(source.read_bytes())
    processor = [_processor()] if FOR_THIS_PROCESSOR in flags else []
    machine = (platform.machine(), *processor, *platform.libc_ver())
    made_of.update("\0".join((*flags, *machine)).encode())
    return cache_folder() / f"{name}-{made_of.hexdigest()[:32]}.so"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lambdascale"


def _provide(name: str, sources: Sequence[Path], flags: Sequence[str], compiled: Path) -> None:
    """Fetches the library, or else compiles it."""
    compiled.parent.mkdir(parents=True, exist_ok=True)
    # Of processes that start together the first one provides it; the others wait for it.
    with (compiled.parent / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if compiled.exists() or _fetched(compiled):
            return
        compiler = shutil.which("cc")
        if compiler is None:
            raise CompileFailed("there is no C compiler (cc): apt install gcc")
        _compile(compiler, sources, flags, compiled)


def _fetched(compiled: Path) -> bool:
    """Whether another node had the library, and it can be loaded here."""
    data = None if _peers is None else _peers.fetch(compiled.name)
    if data is None:
        return False
    with tempfile.TemporaryDirectory(dir=compiled.parent) as own:
        came = Path(own) / "came.so"
        came.write_bytes(data)
        try:
            ctypes.CDLL(str(came))
        except OSError:
            return False
        came.replace(compiled)
    return True


def _compile(compiler: str, sources: Sequence[Path], flags: Sequence[str], compiled: Path) -> None:
    with tempfile.TemporaryDirectory(dir=compiled.parent) as own:
        made = Path(own) / "made.so"
        command = [compiler, *flags, *map(str, sources), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(compiled)


def _processor() -> str:
    """A description of everything that FOR_THIS_PROCESSOR depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
