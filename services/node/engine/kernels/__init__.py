"""Loads the C kernels, compiling them for this machine's processor when they are first needed.

Compiling takes a C compiler (`cc`) about five seconds, once: the result is kept in the user's
cache folder. The functions run on the threads of torch's own OpenMP. A second set of threads would
compete with torch's for cores, because OpenMP threads spin for a while after each product.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from services.node.compiling import FOR_THIS_PROCESSOR, CompileFailed, library
from shared import telemetry

HERE = Path(__file__).parent
SOURCES = tuple(
    HERE / f"{name}.c"
    for name in ("attention", "calls", "products", "vectors", "pairs", "tiles", "team")
)
HEADERS = tuple(HERE / name for name in ("kernels.h", "numbers.h", "products.h"))
FLAGS = (
    "-O3", FOR_THIS_PROCESSOR, "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of activations and weights."""
VECTORS, PAIRS, TILES = range(3)
"""`Way` in kernels.h."""
PLACES = ("qkv", "o", "gate_up", "down")
"""The same in kernels.h: where adapters add to a layer."""
TOGETHER = 4
"""The same in products.h: the rank of an adapter is padded to a multiple of it."""
SMALL = 1 << 16
"""Waking another thread does not pay for fewer multiplications than this."""


def _fields(*declared: str) -> list[tuple[str, Any]]:
    """The fields of a structure. Each argument is "integers", "numbers" or "pointers", followed by
    their names."""
    types = {"integers": ctypes.c_int64, "numbers": ctypes.c_double, "pointers": ctypes.c_void_p}
    found: list[tuple[str, Any]] = []
    for line in declared:
        kind, *names = line.split()
        found += ((name, types[kind]) for name in names)
    return found


class Matrix(ctypes.Structure):
    _fields_ = _fields(
        "integers kind inputs outputs gated way",
        "pointers weight scales bias",
        "integers pitch first",
    )


class Attention(ctypes.Structure):
    _fields_ = _fields(
        "integers rows heads kv_heads head_dim page_heads first_head narrow narrow_kv",
        "numbers eps scale",
        "pointers cos sin queries spans pages",
        "integers n_spans",
        "pointers scratch",
        "integers scratch_size",
    )


class Norm(ctypes.Structure):
    _fields_ = _fields("integers next rows width narrow", "numbers eps", "pointers x weight out")


class Product(ctypes.Structure):
    _fields_ = _fields("integers next threads rows narrow added", "pointers matrix x made")


class Packing(ctypes.Structure):
    _fields_ = _fields("integers next narrow", "pointers matrix weight bias")


class Lookup(ctypes.Structure):
    _fields_ = _fields("integers next rows nbytes", "pointers table ids out")


class Largest(ctypes.Structure):
    _fields_ = _fields("integers next rows width", "pointers x ids")


class Layer(ctypes.Structure):
    _fields_ = _fields(
        "pointers input_norm qk_norm post_norm qkv o gate_up down", "integers window"
    )


class LowRank(ctypes.Structure):
    _fields_ = _fields("integers rank", "pointers a b windows")


class Team(ctypes.Structure):
    _fields_ = [("ranks", ctypes.c_int32), ("rest", ctypes.c_char * 188)]


class Layers(ctypes.Structure):
    _fields_ = [
        *_fields(
            "integers next threads width narrow",
            "numbers eps",
            "pointers attention hidden normed qkv attended gated layers kv",
            "integers kv_step",
            "pointers stops",
            "integers n_blocks",
            "numbers seconds",
            "pointers rung",
            "integers ran",
            "pointers wait team",
            "integers rank over",
            "pointers whose adapters",
            "integers n_adapters",
            "pointers low",
            "integers stride",
        ),
        ("counters", ctypes.c_int64 * 8),
        ("shrunk", ctypes.c_int64 * len(PLACES)),
    ]


class Waits(Layers):
    pass


class Kernels:
    """The functions of calls.c. Each takes the structure that is named like it."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.name = Path(loaded._name).name
        """Stands for all that they are made from and for."""
        self._functions: dict[type[ctypes.Structure], Any] = {
            kind: getattr(loaded, name)
            for kind, name in (
                (Norm, "rms_norm"),
                (Product, "product"),
                (Packing, "pack"),
                (Lookup, "look_up"),
                (Largest, "largest"),
                (Layers, "run_layers"),
                (Waits, "wait_layers"),
            )
        }
        for function in self._functions.values():
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self._addresses = {
            kind: ctypes.cast(function, ctypes.c_void_p)
            for kind, function in self._functions.items()
        }
        self._openmp = _openmp()
        self.barrier = self._openmp and ctypes.cast(self._openmp.GOMP_barrier, ctypes.c_void_p)
        """The barrier at which all threads of a call wait for each other."""
        for function in (loaded.meet, loaded.lose):
            function.argtypes, function.restype = (ctypes.c_void_p,), None
        self.meet = loaded.meet
        """Takes the address of a Team."""
        self.lose = loaded.lose
        """The same."""
        loaded.best_way.restype = ctypes.c_int64
        self.way = int(loaded.best_way())
        """The best way here to multiply bfloat16 (`Way` in kernels.h)."""

    def run(self, argument: ctypes.Structure, threads: int) -> None:
        argument.next = 0
        if threads > 1 and self._openmp is not None:
            function = self._addresses[type(argument)]
            self._openmp.GOMP_parallel(function, ctypes.addressof(argument), threads, 0)
        else:
            self._functions[type(argument)](ctypes.addressof(argument))


def threads_for(items: int, each: int) -> int:
    """How many threads are worth waking for `items` items of about `each` multiplications."""
    return min(torch.get_num_threads(), items, 1 + items * each // SMALL)


def _openmp() -> Any:
    """The OpenMP library that torch runs on, found by its functions among those of this process.
    None if it is not GNU's (libgomp)."""
    everything = ctypes.CDLL(None)
    if not hasattr(everything, "GOMP_parallel"):
        return None
    start = everything.GOMP_parallel
    start.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None
    return everything


@cache
def load() -> Kernels | None:
    """The kernels, or None (which is logged) if they cannot be compiled here."""
    try:
        return Kernels(library("kernels", SOURCES, HEADERS, FLAGS))
    except CompileFailed as error:
        telemetry.logger("engine").warning(
            "the kernels were not compiled: decoding on the processor is slower", error=str(error)
        )
        return None
