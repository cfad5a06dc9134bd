"""What RDMA needs of pyverbs, typed: a device, its memory, and the two ends of one-sided reads.

Importing this module raises ImportError where pyverbs, or libibverbs beside it, is not installed.
pyverbs comes with the system (Debian, Ubuntu: python3-pyverbs); from a virtual environment that
package alone is imported from there.
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
"""READs that one connection has under way at most."""
ACK_TIMEOUT = 15
"""4.096 us * 2^15 = 134 ms: with the retries, a peer that is silent for 0.94 s is lost."""
RETRIES = 6
"""Not 7, which is without end for Soft-RoCE."""
HOP_LIMIT = 64
RNR_TIMER = 12
"""Asked for, and without effect: a READ needs no receiver that is ready."""


Outcome = Literal["done", "refused", "unanswered", "broken"]
"""How a READ ended. refused: the peer has no such memory for us."""
_OUTCOMES: dict[int, Outcome] = {
    ibv.IBV_WC_SUCCESS: "done",
    ibv.IBV_WC_REM_ACCESS_ERR: "refused",
    ibv.IBV_WC_REM_INV_REQ_ERR: "refused",
    ibv.IBV_WC_RETRY_EXC_ERR: "unanswered",
}


class Registration:
    """Of one memory, which it keeps from going away."""

    def __init__(self, pd: PD, memory: Memory) -> None:
        """ConfigError: it cannot be."""
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
    """Of a GPU's memory, for READs to write to; it keeps the memory from going away."""

    def __init__(self, pd: PD, memory: DmaBuf, nbytes: int) -> None:
        """TransportError: the adapter, its driver or pyverbs cannot."""
        with _transport_errors("no GPUDirect RDMA"):
            self._mr = DmaBufMR(
                pd, nbytes, ibv.IBV_ACCESS_LOCAL_WRITE, memory.descriptor, memory.offset
            )
        self.address = memory.offset
        """Where it begins for the adapter: pyverbs has addresses be offsets in the dma-buf."""
        self.lkey: int = self._mr.lkey


@dataclass(frozen=True, slots=True)
class Target:
    lkey: int
    address: int
    """For the adapter."""
    landing: Landing | None
    """That brings the bytes to the buffer; None: it is the buffer that they are written to."""


class Device:
    """An RDMA device, opened, and the memories that it may read and write."""

    def __init__(
        self,
        name: str,
        gid_index: int,
        memories: Sequence[Memory],
        landing: Landing | None = None,
    ) -> None:
        """`landing`: of the first memory. ConfigError: no such device, it is down, it has no such
        address, or no such memory."""
        self._on_device: tuple[DeviceRegistration, Landing] | None = None
        """Where READs into the first memory go to; None: to itself."""
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
        """The registered memory that all of the buffer lies in, and its address."""
        found = None if buffer.readonly or not buffer.nbytes else find(self._memories, buffer)
        if found is None:
            return None
        region = self._regions[found[0]]
        return region, region.address + found[1]

    def target(self, buffer: memoryview) -> Target | None:
        """Where a READ that is to fill the buffer writes to."""
        found = self.locate(buffer)
        if found is None:
            return None
        region, address = found
        if self._on_device is None or region is not self._regions[0]:
            return Target(region.lkey, address, None)
        device, landing = self._on_device
        return Target(device.lkey, device.address + address - region.address, landing)

    def close(self) -> None:
        """Closes all that was made with it, too."""
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
    """A queue pair, reliable and connected."""

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
    """The end that is read from: the adapter answers, without this process."""

    def __init__(self, device: Device, peer: Endpoint) -> None:
        """Ready for the peer. TransportError: there is no way to it."""
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
    """The end that reads, with completions of its own."""

    def __init__(self, device: Device) -> None:
        """TransportError: the device or this process has no room for another."""
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
        """How many READs may be under way. TransportError: there is no way to the peer."""
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

        However it ends, `completed` tells of it, by its `name` (64 bits).
        """
        with _transport_errors("a READ cannot begin"):
            request = SendWR(
                wr_id=name, opcode=ibv.IBV_WR_RDMA_READ, num_sge=1, sg=[SGE(local, nbytes, lkey)]
            )
            request.set_wr_rdma(rkey, remote)
            self._qp.post_send(request)

    def completed(self) -> list[tuple[int, Outcome]]:
        """The READs that ended since the last call; `descriptor` is readable when there are any."""
        with _transport_errors("completions cannot be read"):
            while self._take_event():
                self._cq.ack_events(1)
            self._cq.req_notify()  # before the look at the queue: what comes between is told of
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
        """READs under way end, untold; nothing is written to our memory after this."""
        _close(self._qp, self._cq, self._channel)


class _Closes(Protocol):
    def close(self) -> None: ...


def _close(*things: _Closes) -> None:
    """All of them, though one fails: what the device does not give back goes with its context."""
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
    """A channel, and its descriptor, which pyverbs keeps to itself; it does not block."""
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
