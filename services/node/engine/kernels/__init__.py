"""Loads kernels.c and products.c, compiled for this machine's processor when first needed.

It takes a C compiler (`cc`) some three seconds, once: what it made is kept in the user's cache
folder. The functions run on the threads of torch's own OpenMP: others would fight with those for
cores, since they spin for a while after each product.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shared import telemetry

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "products.c"))
HEADER = Path(__file__).with_name("numbers.h")
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC",
)  # fmt: skip
SMALL = 1 << 16
"""Multiplications that are not worth waking another thread."""


def _fields(integers: str, **others: Any) -> tuple[tuple[str, Any], ...]:
    """Of an argument, which all begin with the counter."""
    names = ("next", *integers.split())
    return (*((name, ctypes.c_int64) for name in names), *others.items())


class Norm(ctypes.Structure):
    _fields_ = _fields(
        "rows width narrow",
        x=ctypes.c_void_p, weight=ctypes.c_void_p, out=ctypes.c_void_p, eps=ctypes.c_double,
    )  # fmt: skip


class Product(ctypes.Structure):
    _fields_ = _fields(
        "threads kind rows inputs outputs narrow gated added",
        x=ctypes.c_void_p, weight=ctypes.c_void_p, scales=ctypes.c_void_p, bias=ctypes.c_void_p,
        made=ctypes.c_void_p,
    )  # fmt: skip


class Packing(ctypes.Structure):
    _fields_ = _fields(
        "kind inputs outputs narrow gated",
        matrix=ctypes.c_void_p, added=ctypes.c_void_p, weight=ctypes.c_void_p,
        scales=ctypes.c_void_p, bias=ctypes.c_void_p,
    )  # fmt: skip


class Attention(ctypes.Structure):
    _fields_ = _fields(
        "workers narrow rows heads kv_heads head_dim window",
        qkv=ctypes.c_void_p, qk_norm=ctypes.c_void_p, eps=ctypes.c_double, scale=ctypes.c_double,
        cos=ctypes.c_void_p, sin=ctypes.c_void_p, slots=ctypes.c_void_p, kv=ctypes.c_void_p,
        queries=ctypes.c_void_p, attended=ctypes.c_void_p, spans=ctypes.c_void_p,
        pages=ctypes.c_void_p, n_spans=ctypes.c_int64, scratch=ctypes.c_void_p,
        scratch_size=ctypes.c_int64,
    )  # fmt: skip


class Kernels:
    """The functions, each with an argument of the structure above that its source has for it."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._functions = {
            name: getattr(loaded, name)
            for name in ("rms_norm", "write_kv", "attend", "product", "tile_product", "pack")
        }
        for function in self._functions.values():
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self._addresses = {
            name: ctypes.cast(function, ctypes.c_void_p)
            for name, function in self._functions.items()
        }
        self._on_threads = _openmp()
        self.tiles = bool(loaded.has_tiles())
        """Whether `tile_product` can run."""

    def run(self, name: str, argument: ctypes.Structure, threads: int) -> None:
        function, address = self._functions[name], ctypes.addressof(argument)
        argument.next = 0
        if threads > 1 and self._on_threads is not None:
            self._on_threads(self._addresses[name], address, threads, 0)
        else:
            function(address)


def threads_for(items: int, each: int) -> int:
    """As many as are worth waking. `each`: the multiplications of an item, more or less."""
    return min(torch.get_num_threads(), items, 1 + items * each // SMALL)


def _openmp() -> Any:
    """GOMP_parallel of the library that torch runs on; None if it has another one."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        start = ctypes.CDLL(str(path)).GOMP_parallel
        start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        start.restype = None
        return start
    return None


@cache
def load() -> Kernels | None:
    """None, which is logged, if they can't be compiled here."""
    log = telemetry.logger("engine")
    compiler = shutil.which("cc")
    if compiler is None:
        log.warning("no C compiler (cc): decoding on the processor is slower; apt install gcc")
        return None
    try:
        return Kernels(_compiled(compiler))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # no home: RuntimeError
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        log.warning(
            "the kernels were not compiled: decoding on the processor is slower", error=said
        )
        return None


def _compiled(compiler: str) -> Path:
    made_of = hashlib.sha256()
    for source in (*SOURCES, HEADER):
        made_of.update(source.read_bytes())
    made_of.update("\0".join((compiler, *FLAGS, platform.machine(), _processor())).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lambdascale"
    library = folder / f"kernels-{made_of.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / "kernels.so"
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)
    return library


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
