"""Frames, and what a node under attack is asked about itself."""

import socket
import struct

from services.node.transport.wire import Kind, encode_prefix
from tests.support.raw_peer import Node, Streams


async def reset(streams: Streams) -> None:
    """Breaks the connection off without a word of parting (RST)."""
    sock = streams[1].get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    streams[1].transport.abort()


async def serves(node: Node) -> None:
    """The node still does for others what it is there for."""
    assert await node.read(node.address, "good", 4) == b"good"


def data(identity: int, payload: bytes) -> bytes:
    return encode_prefix(Kind.DATA, id=identity, payload=len(payload)) + payload
