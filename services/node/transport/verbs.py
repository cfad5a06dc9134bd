"""The part of pyverbs that RDMA needs, typed: a device, its memory, and the two ends of one-sided
reads.

Importing this module raises ImportError if pyverbs, or libibverbs under it, is not installed.
pyverbs comes with the system (Debian, Ubuntu: python3-pyverbs). In a virtual environment only that
package is imported from the system.
"""

import errno
import importlib.util
import ipaddress
import os
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from services.node.memory.cuda import DmaBuf
from services.node.memory.landing import Landing
from services.node.memory.views import Memory, address, find
from services.node.transport.rdma_endpoint import Endpoint
from shared import telemetry
from shared.errors import ConfigError, TransportError

_SYSTEM = Path("/usr/lib/python3/dist-packages/pyverbs")


def _take_from_system() -> None:
    spec = importlib.util.spec_from_file_location(
        "pyverbs", _SYSTEM / "__init__.py", submodule_search_locations=[str(_SYSTEM)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["pyverbs"])


if importlib.util.find_spec("pyverbs") is None and _SYSTEM.is_dir():
    _take_from_system()

import pyverbs.enums as ibv  # noqa: E402
from pyverbs.addr import GID, AHAttr, GlobalRoute  # noqa: E402
from pyverbs.cq import CQ, CompChannel  # noqa: E402
from pyverbs.device import Context  # noqa: E402
from pyverbs.mr import MR, DmaBufMR  # noqa: E402
from pyverbs.pd import PD  # noqa: E402
from pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError  # noqa: E402
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr  # noqa: E402
from pyverbs.wr import SGE, SendWR  # noqa: E402

_log = telemetry.logger("rdma")
PORT = 1
MAX_READS = 16
"""The most READs that one connection has under way."""
ACK_TIMEOUT = 15
"""4.096 us * 2^15 = 134 ms. With the retries, a peer is lost after 0.94 s of silence."""
RETRIES = 6
"""Not 7, which means without end for Soft-RoCE."""
HOP_LIMIT = 64
RNR_TIMER = 12
"""Must be set, but has no effect here: a READ needs no receiver that is ready."""


Outcome = Literal["done", "refused", "unanswered", "broken"]
"""How a READ ended. `refused`: the peer has no such memory for us."""
_OUTCOMES: dict[int, Outcome] = {
    ibv.IBV_WC_SUCCESS: "done",
    ibv.IBV_WC_REM_ACCESS_ERR: "refused",
    ibv.IBV_WC_REM_INV_REQ_ERR: "refused",
    ibv.IBV_WC_RETRY_EXC_ERR: "unanswered",
}


class Registration:
    """The registration of one memory. It keeps the memory alive."""

    def __init__(self, pd: PD, memory: Memory) -> None:
        """ConfigError if the memory cannot be registered."""
        self._view = memory.view
        access = ibv.IBV_ACCESS_LOCAL_WRITE | ibv.IBV_ACCESS_REMOTE_READ
        try:
            self._mr = MR(pd, memory.view.nbytes, access, address=address(memory.view))
        except PyverbsError as error:
            raise ConfigError(
                f"{memory.view.nbytes} bytes cannot be registered for RDMA: {error}; "
                "is the limit of locked memory too low (ulimit -l)?"
            ) from error
        self.address: int = self._mr.buf
        self.lkey: int = self._mr.lkey
        self.rkey: int = self._mr.rkey


class DeviceRegistration:
    """The registration of a GPU's memory, for READs to write to. It keeps the memory alive."""

    def __init__(self, pd: PD, memory: DmaBuf, nbytes: int) -> None:
        """TransportError if the adapter, its driver or pyverbs does not support it."""
        with _transport_errors("no GPUDirect RDMA"):
            self._mr = DmaBufMR(
                pd, nbytes, ibv.IBV_ACCESS_LOCAL_WRITE, memory.descriptor, memory.offset
            )
        self.address = memory.offset
        """The adapter's address of the memory's first byte. pyverbs takes offsets in the dma-buf as
        addresses."""
        self.lkey: int = self._mr.lkey


@dataclass(frozen=True, slots=True)
class Target:
    lkey: int
    address: int
    """The address for the adapter."""
    landing: Landing | None
    """Copies the bytes on to the buffer; None if READs write to the buffer itself."""


class Device:
    """An opened RDMA device, and the memories that it may read and write."""

    def __init__(
        self,
        name: str,
        gid_index: int,
        memories: Sequence[Memory],
        landing: Landing | None = None,
    ) -> None:
        """`landing`: the device copy of the first memory. ConfigError: there is no such device, it
        is down, or it has no such address or memory."""
        self._on_device: tuple[DeviceRegistration, Landing] | None = None
        """Where READs into the first memory go; None: to the memory itself."""
        try:
            self.context = Context(name=name)
        except PyverbsError as error:
            raise ConfigError(f"no RDMA device {name}: {error}; `rdma link` lists them") from error
        try:
            port, limits = self.context.query_port(PORT), self.context.query_device()
            if port.state != ibv.IBV_PORT_ACTIVE:
                raise ConfigError(f"RDMA device {name} is down: see `rdma link`")
            self.gid_index = gid_index
            self.gid = self._find_gid(name)
            self.lid: int = port.lid
            self.mtu = int(port.active_mtu)
            self.max_message: int = port.max_msg_sz
            self.reads_made = min(limits.max_qp_init_rd_atom, MAX_READS)
            self.reads_answered = min(limits.max_qp_rd_atom, MAX_READS)
            self.pd = PD(self.context)
            self.unused_cq = CQ(self.context, 1)
            self._memories = memories
            self._regions = [Registration(self.pd, memory) for memory in memories]
            if landing is not None:
                self._open_landing(landing)
        except BaseException:
            self.close()
            raise

    def locate(self, buffer: memoryview) -> tuple[Registration, int] | None:
        """The registered memory that holds the whole buffer, and the buffer's address in it. None
        if there is none."""
        found = None if buffer.readonly or not buffer.nbytes else find(self._memories, buffer)
        if found is None:
            return None
        region = self._regions[found[0]]
        return region, region.address + found[1]

    def target(self, buffer: memoryview) -> Target | None:
        """Where a READ that should fill the buffer writes to."""
        found = self.locate(buffer)
        if found is None:
            return None
        region, address = found
        if self._on_device is None or region is not self._regions[0]:
            return Target(region.lkey, address, None)
        device, landing = self._on_device
        return Target(device.lkey, device.address + address - region.address, landing)

    def close(self) -> None:
        """Also closes everything that was made with the device."""
        self.context.close()

    def _open_landing(self, landing: Landing) -> None:
        memory = landing.dma_buf()
        if memory is None:
            return
        try:
            registration = DeviceRegistration(self.pd, memory, landing.nbytes)
        except TransportError as error:
            _log.warning("RDMA goes to the device by the host's arena", why=str(error))
        else:
            self._on_device = registration, landing
            landing.ways.append("GPUDirect RDMA")
        finally:
            os.close(memory.descriptor)

    def _find_gid(self, name: str) -> bytes:
        try:
            gid = ipaddress.IPv6Address(str(self.context.query_gid(PORT, self.gid_index)))
        except (PyverbsError, OverflowError):
            gid = ipaddress.IPv6Address(0)
        if gid.is_unspecified:
            raise ConfigError(
                f"RDMA device {name} has no address with index {self.gid_index}: they are in "
                f"/sys/class/infiniband/{name}/ports/{PORT}/gids"
            )
        return gid.packed


class _End:
    """A reliable, connected queue pair."""

    def __init__(self, device: Device, cq: CQ, reads: int) -> None:
        self._device = device
        cap = QPCap(max_send_wr=reads, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        kind = QPInitAttr(qp_type=ibv.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=1)
        self._qp = QP(device.pd, kind)
        self.endpoint = Endpoint(
            gid=device.gid,
            lid=device.lid,
            qpn=self._qp.qp_num,
            psn=secrets.randbits(24),
            mtu=device.mtu,
            reads=reads,
        )

    def _attributes(self, peer: Endpoint) -> QPAttr:
        route = GlobalRoute(
            dgid=GID(ipaddress.IPv6Address(peer.gid).exploded),
            sgid_index=self._device.gid_index,
            hop_limit=HOP_LIMIT,
        )
        attributes = QPAttr(port_num=PORT)
        attributes.pkey_index = 0
        attributes.ah_attr = AHAttr(port_num=PORT, dlid=peer.lid, is_global=1, gr=route)
        attributes.path_mtu = min(self._device.mtu, peer.mtu)
        attributes.dest_qp_num = peer.qpn
        attributes.rq_psn = peer.psn
        attributes.sq_psn = self.endpoint.psn
        attributes.min_rnr_timer = RNR_TIMER
        return attributes


class SourceEnd(_End):
    """The end that is read from. The adapter answers, without this process."""

    def __init__(self, device: Device, peer: Endpoint) -> None:
        """Gets ready for the peer. TransportError if there is no route to it."""
        reads = min(peer.reads, device.reads_answered)
        with _transport_errors(f"no RDMA with {peer}"):
            super().__init__(device, device.unused_cq, reads)
            attributes = self._attributes(peer)
            attributes.qp_access_flags = ibv.IBV_ACCESS_REMOTE_READ
            attributes.max_dest_rd_atomic = reads
            self._qp.to_rtr(attributes)

    def close(self) -> None:
        _close(self._qp)


class ReaderEnd(_End):
    """The end that reads, with a completion queue of its own."""

    def __init__(self, device: Device) -> None:
        """TransportError if the device or this process has no room for another end."""
        made: list[_Closes] = []
        try:
            with _transport_errors("no further RDMA connection"):
                self._channel, self.descriptor = _completion_channel(device.context)
                made.append(self._channel)
                self._cq = CQ(device.context, device.reads_made, None, self._channel, 0)
                made.append(self._cq)
                self._cq.req_notify()
                super().__init__(device, self._cq, device.reads_made)
        except TransportError:
            _close(*reversed(made))
            raise

    def connect(self, peer: Endpoint) -> int:
        """Connects, and returns how many READs may be under way. TransportError if there is no
        route to the peer."""
        reads = min(peer.reads, self.endpoint.reads)
        with _transport_errors(f"no RDMA with {peer}"):
            attributes = self._attributes(peer)
            attributes.max_rd_atomic = reads
            attributes.timeout = ACK_TIMEOUT
            attributes.retry_cnt = RETRIES
            self._qp.to_rts(attributes)
        return reads

    def read(self, name: int, local: int, lkey: int, nbytes: int, remote: int, rkey: int) -> None:
        """Begins one READ, from `remote` at the peer to `local` here (addresses).

        However it ends, `completed` reports it under its `name` (64 bits).
        """
        with _transport_errors("a READ cannot begin"):
            request = SendWR(
                wr_id=name, opcode=ibv.IBV_WR_RDMA_READ, num_sge=1, sg=[SGE(local, nbytes, lkey)]
            )
            request.set_wr_rdma(rkey, remote)
            self._qp.post_send(request)

    def completed(self) -> list[tuple[int, Outcome]]:
        """The READs that ended since the last call. `descriptor` is readable when there are any."""
        with _transport_errors("completions cannot be read"):
            while self._take_event():
                self._cq.ack_events(1)
            # Before looking at the queue, so that what ends in between is reported.
            self._cq.req_notify()
            _, found = self._cq.poll(self.endpoint.reads)
        return [(item.wr_id, _OUTCOMES.get(item.status, "broken")) for item in found]

    def _take_event(self) -> bool:
        try:
            self._channel.get_cq_event(self._cq)
        except PyverbsRDMAError as error:
            if error.error_code == errno.EAGAIN:
                return False
            raise
        return True

    def close(self) -> None:
        """Ends running READs without a report. Nothing is written to our memory afterwards."""
        _close(self._qp, self._cq, self._channel)


class _Closes(Protocol):
    def close(self) -> None: ...


def _close(*things: _Closes) -> None:
    """Closes all of them, even if one fails: what the device does not give back goes with its
    context."""
    for thing in things:
        try:
            thing.close()
        except PyverbsError as error:
            _log.warning("RDMA resource not closed", error=str(error))


@contextmanager
def _transport_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (PyverbsError, OSError) as error:
        raise TransportError(f"{what}: {error}") from error


_channels = threading.Lock()


def _completion_channel(context: Context) -> tuple[CompChannel, int]:
    """A non-blocking completion channel and its descriptor, which pyverbs does not expose."""
    with _channels:
        before = _event_descriptors()
        channel = CompChannel(context)
        (descriptor,) = _event_descriptors() - before
    os.set_blocking(descriptor, False)
    return channel, descriptor


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
