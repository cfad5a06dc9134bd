"""What the two ends of an RDMA connection tell each other before the first READ."""

import ipaddress
from typing import Annotated

import msgspec

from shared.errors import ProtocolViolation

Bits24 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class Endpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    gid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """The adapter's address in the form of an IPv6 address."""
    lid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """The adapter's address on InfiniBand; 0 on Ethernet."""
    qpn: Bits24
    """The number of the queue pair."""
    psn: Bits24
    """The number of the first packet that this end sends."""
    mtu: Annotated[int, msgspec.Meta(ge=1, le=5)]
    """The size of a packet as verbs count it: 1 is 256 bytes, 2 is 512, ... 5 is 4096."""
    reads: Annotated[int, msgspec.Meta(ge=1, le=255)]
    """The number of concurrent READs that the dialler makes, or that the listener answers, at
    most."""

    def __str__(self) -> str:
        gid = ipaddress.IPv6Address(self.gid)
        return f"{gid.ipv4_mapped or gid} (queue pair {self.qpn})"


def encode(endpoint: Endpoint) -> bytes:
    return msgspec.msgpack.encode(endpoint)


def decode(data: bytes) -> Endpoint:
    try:
        return msgspec.msgpack.decode(data, type=Endpoint)
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"not an RDMA endpoint: {error}") from error
