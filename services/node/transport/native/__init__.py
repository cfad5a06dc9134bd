"""The relay loop in C (hub.c says what it is): compiled, and its functions as Python sees them."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from services.node.compiling import CompileFailed, library
from services.node.transport import pacing, stream, wire
from shared import telemetry
from shared.layout import DIGEST_BYTES
from shared.port_shares import SERVING_PARTS

HERE = Path(__file__).parent
SOURCES = tuple(HERE / f"{name}.c" for name in ("digest", "hub", "ports", "receiving", "sending"))
HEADERS = tuple(HERE / f"{name}.h" for name in ("digest", "internal", "relay"))
SCRATCH = 64 * 1024
SERVING_NUMBER = 1
"""The number of the flow `pacing.SERVING_FLOW`."""
_CONSTANTS = {
    "PREFIX_BYTES": wire.PREFIX_BYTES,
    "KIND_DATA": int(wire.Kind.DATA),
    "GRANT_S": pacing.GRANT_S,
    "AHEAD_S": pacing.AHEAD_S,
    "MIN_GRANT": pacing.MIN_GRANT,
    "MAX_GRANT": pacing.MAX_GRANT,
    "SERVING_FLOW": SERVING_NUMBER,
    "SERVING_PARTS": SERVING_PARTS,
    "MEMORY": pacing.MEMORY,
    "LATENESS_S": pacing.LATENESS_S,
    "QUIET_S": pacing.QUIET_S,
    "PATIENCE_S": pacing.PATIENCE_S,
    "AT_ONCE": stream.AT_ONCE,
    "SCRATCH": SCRATCH,
    "DIGEST_BYTES": DIGEST_BYTES,
}
FLAGS = (
    "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread",
    "-Wl,-Bsymbolic", "-D_GNU_SOURCE",
    *(f"-D{name}={value}" for name, value in _CONSTANTS.items()),
)  # fmt: skip
FRAME, LOST, CHUNKS, READ, SERVED = range(5)
"""`EVENT_...` in relay.h."""


class Event(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "conn", "id", "a", "b")),
        ("began", ctypes.c_double),
        ("ended", ctypes.c_double),
        ("head", ctypes.c_uint8 * 24),
    )


_P, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hub_new": (_P, (_D, ctypes.c_char_p)),
    "hub_free": (None, (_P,)),
    "hub_run": (None, (_P,)),
    "hub_stop": (None, (_P,)),
    "hub_told": (_I, (_P,)),
    "hub_events": (_I, (_P, _P, _I)),
    "hub_charge": (None, (_P, _I, _I)),
    "hub_eager": (None, (_P, _I)),
    "region_new": (_P, (_P, _P, _I)),
    "region_ready": (None, (_P, _I)),
    "region_drop": (None, (_P,)),
    "conn_new": (_P, (_P, _I, _I, _I, _I)),
    "conn_serial": (_I, (_P,)),
    "conn_free": (None, (_P,)),
    "conn_resume": (None, (_P,)),
    "conn_silent_since": (_D, (_P, _P, _I)),
    "conn_forgive": (None, (_P, _D)),
    "conn_post": (_I, (_P, ctypes.c_char_p, _I)),
    "conn_sent_at": (_D, (_P,)),
    "read_begin": (_I, (_P, _I, _P, _I, _I, _I, ctypes.c_char_p, _P, _I)),
    "read_drop": (None, (_P, _I)),
    "read_end": (None, (_P, _I)),
    "serve_begin": (_I, (_P, _I, _P, _I, _I, _I, _I)),
    "serve_stop": (None, (_P, _I)),
    "encode_data": (None, (ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint64)),
    "digest_new": (_P, (_I,)),
    "digest_free": (None, (_P,)),
    "digest_update": (None, (_P, ctypes.c_char_p, ctypes.c_size_t)),
    "digest_end": (None, (_P, ctypes.c_char_p)),
    "decode_data": (_I, (ctypes.c_char_p, _P, _P)),
}


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library, its functions with their types."""
    for name, (returned, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = returned, arguments
    return loaded


@cache
def load() -> ctypes.CDLL | None:
    """The library, or None (which is logged) if it cannot be compiled here."""
    try:
        return declared(library("relay", SOURCES, HEADERS, FLAGS))
    except CompileFailed as error:
        telemetry.logger("transport").warning(
            "the relay loop was not compiled: relaying costs more processor time", error=str(error)
        )
        return None
