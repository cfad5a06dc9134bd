"""The thread that runs relay.c, and what it tells the loop."""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Self

from services.node.memory.views import address
from services.node.transport import sockets
from services.node.transport.connection import Connection
from services.node.transport.native import SERVING_NUMBER, Event
from services.node.transport.pacing import SERVING_FLOW
from services.node.transport.regions import Region
from services.node.transport.wire import Kind, encode_prefix
from shared.errors import TransportError

EVENTS = 256
"""The most events that are fetched at a time."""

OnEvent = Callable[[Event], None]


class Hub:
    """The C side of one transport. Used on the transport's loop only."""

    def __init__(self, library: ctypes.CDLL, bytes_per_s: int) -> None:
        self.library = library
        heartbeat = encode_prefix(Kind.HEARTBEAT)
        self.handle = library.hub_new(bytes_per_s, heartbeat)
        if not self.handle:
            raise TransportError("no relay loop: out of memory or file descriptors")
        self._told = int(library.hub_told(self.handle))
        self._thread = threading.Thread(
            target=library.hub_run, args=(self.handle,), name="relay", daemon=True
        )
        self._events = (Event * EVENTS)()
        self.halves: dict[int, OnEvent] = {}
        self._flows = {"": 0, SERVING_FLOW: SERVING_NUMBER}
        self._mirrors: set[_Mirror] = set()
        self._served_directly = 0

    async def __aenter__(self) -> Self:
        self._thread.start()
        asyncio.get_running_loop().add_reader(self._told, self.hear)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._told)
        for mirror in list(self._mirrors):
            mirror.close()
        self.library.hub_stop(self.handle)
        await asyncio.to_thread(self._thread.join)
        self.library.hub_free(self.handle)

    def hear(self) -> None:
        """Takes in what C has told."""
        while count := self.library.hub_events(self.handle, self._events, EVENTS):
            # Whoever hears of an event may call this again.
            for event in (Event * count).from_buffer_copy(self._events):
                if on_event := self.halves.get(event.conn):
                    on_event(event)

    def charge(self, nbytes: int, *, out: bool) -> None:
        """Accounts for bytes that bypass the ports."""
        self.library.hub_charge(self.handle, out, nbytes)

    def serve_directly(self, more: int) -> None:
        """Others are served from regions too: tell at once how far these are shown."""
        self._served_directly += more
        self.library.hub_eager(self.handle, self._served_directly > 0)

    def flow(self, name: str) -> int:
        return self._flows.setdefault(name, len(self._flows))

    def region(self, region: Region) -> int:
        """C's watermark of a region, which follows the region's."""
        if region.mirror is None:
            region.mirror = _Mirror(self.library, self.handle, region, self._mirrors)
        assert isinstance(region.mirror, _Mirror)
        return int(region.mirror.handle)


class _Mirror:
    """C's watermark of a region. Does nothing once it is closed."""

    def __init__(
        self, library: ctypes.CDLL, hub: int, region: Region, mirrors: "set[_Mirror]"
    ) -> None:
        self._library = library
        self._mirrors = mirrors
        self.handle = library.region_new(hub, address_of(region.buffer), region.ready)
        if not self.handle:
            raise TransportError("no relay loop: out of memory")
        mirrors.add(self)

    def show(self, ready: int) -> None:
        if self.handle:
            self._library.region_ready(self.handle, ready)

    def close(self) -> None:
        if self.handle:
            self._library.region_drop(self.handle)
            self.handle = None
            self._mirrors.discard(self)


class Half:
    """The direction of a connection that C has, with a descriptor of its own."""

    def __init__(
        self,
        hub: Hub,
        connection: Connection,
        on_event: OnEvent,
        *,
        receives: bool,
        max_payload: int,
    ) -> None:
        self._hub = hub
        self._library = hub.library
        self._conn = hub.library.conn_new(
            hub.handle, connection.sock.fileno(), receives, max_payload, sockets.deep_buffers()
        )
        if not self._conn:
            raise TransportError("no relay loop: out of memory or file descriptors")
        self._serial = int(hub.library.conn_serial(self._conn))
        hub.halves[self._serial] = on_event
        self.closed = False

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function of relay.h about this connection; does nothing once it is closed."""
        if self.closed:
            return 0
        return int(getattr(self._library, name)(self._conn, *arguments) or 0)

    def close(self) -> None:
        """Once this returns, C touches none of the connection's buffers."""
        if not self.closed:
            self.closed = True
            del self._hub.halves[self._serial]
            self._library.conn_free(self._conn)

    # --- in the connection's place ---

    def silent_since(self, *, any_byte: bool) -> tuple[float | None, bool]:
        if self.closed:
            return None, False
        in_frame = ctypes.c_int64()
        since = self._library.conn_silent_since(self._conn, ctypes.byref(in_frame), any_byte)
        return (since if since >= 0 else None), bool(in_frame)

    def forgive_silence(self, now: float) -> None:
        if not self.closed:
            self._library.conn_forgive(self._conn, now)

    def post(self, frame: bytes) -> int:
        return self.call("conn_post", frame, len(frame))

    def sent_at(self) -> float:
        return 0.0 if self.closed else float(self._library.conn_sent_at(self._conn))


class _Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("rest", ctypes.c_void_p * 5),
    )


def address_of(buffer: memoryview) -> int:
    """Returns the address of a buffer's first byte. The buffer may be read-only."""
    if not buffer.readonly:
        return address(buffer)
    got = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(got), 0)
    try:
        return int(got.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(got))
