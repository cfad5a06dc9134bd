"""The bytes of the TCP data plane: pure encoding and parsing, no sockets.

Every frame is a fixed prefix (kind, id, body length, payload length; big-endian), a body of that
kind and a payload. A connection starts with HELLO from both ends. Where the cluster has a secret,
the listener sends a CHALLENGE before, and each HELLO has a proof (see secret.py). Then the
connection carries, by its purpose:

    READS      dialler -> listener: PERMIT, READ, TAKEN, CANCEL
               listener -> dialler: DATA, GRANT, FAULT
    MESSAGES   dialler -> listener: MESSAGE

and HEARTBEAT both ways. A listener that says so in its HELLO answers a READ only after a PERMIT
that allows it, and refuses others with a FAULT. A read's bytes come in order, interleaved with
those of other reads: as DATA, or, if the read is direct and the handshake found a way (see
direct.py), by GRANTs of places to take them from. A read has one GRANT at a time, until its TAKEN.
CANCEL of a read that is still served is answered by FAULT with code `cancelled`, after the DATA or
TAKEN of what was begun. Lengths are checked before anything is allocated; whatever does not fit is
a ProtocolViolation.
"""

import enum
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from services.node.transport.direct import Place
from services.node.transport.secret import NONCE_BYTES
from shared.errors import ProtocolViolation
from shared.versions import beside, refusal

MAGIC = b"LSDP"
VERSION = 3
OLDEST = 2
"""The oldest version that is understood."""
MAX_BODY = 1 << 20
MAX_HELLO = 8 << 10
MAX_PERMIT = 64 << 10
MAX_MESSAGE = 1000
"""The most characters of a FAULT's message."""
CANCELLED = "cancelled"

_PREFIX = struct.Struct("!B3xIIQ")
_HELLO = struct.Struct("!4sH")
_READ = struct.Struct("!i?QQ")
_GRANT = struct.Struct("!IQQ")
PREFIX_BYTES = _PREFIX.size


class Kind(enum.IntEnum):
    HELLO = 1
    READ = 2
    CANCEL = 3
    DATA = 4
    FAULT = 5
    MESSAGE = 6
    HEARTBEAT = 7
    GRANT = 8
    TAKEN = 9
    CHALLENGE = 10
    PERMIT = 11


class Purpose(enum.IntEnum):
    READS = 1
    MESSAGES = 2


@dataclass(frozen=True, slots=True)
class Prefix:
    kind: Kind
    id: int
    """The id of the frame's read; 0 in frames that belong to no read."""
    body: int
    payload: int


class Hello(msgspec.Struct, frozen=True, array_like=True):
    purpose: Purpose
    instance: Annotated[int, msgspec.Meta(ge=0)]
    """A random number for each transport: another process at an old address is another peer."""
    address: str
    """The address at which the sender listens."""
    ways: dict[str, bytes] = {}
    """Way -> data: the dialler's offers for its reads, or the listener's answer to one of them."""
    nonce: bytes = b""
    """Drawn by the dialler, for the listener's proof."""
    proof: bytes = b""
    """That the sender knows the cluster's secret; over this HELLO without its proof, too."""
    asks: bool = False
    """The listener: whether a PERMIT has to come before reads that it allows."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    priority: int
    offset: int
    nbytes: int
    region: str
    direct: bool = False
    """Whether the reader can take the bytes by the agreed way."""


_hello_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)

_WITH_BODY = frozenset(
    {Kind.HELLO, Kind.READ, Kind.FAULT, Kind.MESSAGE, Kind.GRANT, Kind.CHALLENGE, Kind.PERMIT}
)
_MOST_BODY = {Kind.HELLO: MAX_HELLO, Kind.CHALLENGE: NONCE_BYTES, Kind.PERMIT: MAX_PERMIT}
_WITH_PAYLOAD = frozenset({Kind.DATA, Kind.MESSAGE})
_WITH_ID = frozenset({Kind.READ, Kind.CANCEL, Kind.DATA, Kind.FAULT, Kind.GRANT, Kind.TAKEN})


def encode_prefix(kind: Kind, *, id: int = 0, body: int = 0, payload: int = 0) -> bytes:
    """A frame's first PREFIX_BYTES bytes. `body` and `payload`: the sizes of what follows."""
    return _PREFIX.pack(kind, id, body, payload)


def parse_prefix(data: bytes | bytearray | memoryview, *, max_payload: int) -> Prefix:
    """The prefix of a frame that a peer sent. ProtocolViolation if no frame may begin so."""
    if len(data) != PREFIX_BYTES:
        raise ProtocolViolation(f"a frame prefix has {PREFIX_BYTES} bytes, not {len(data)}")
    raw, identity, body, payload = _PREFIX.unpack(data)
    try:
        kind = Kind(raw)
    except ValueError:
        raise ProtocolViolation(f"unknown frame kind {raw}") from None
    if body > _MOST_BODY.get(kind, MAX_BODY) or (body and kind not in _WITH_BODY):
        raise ProtocolViolation(f"{kind.name} frame with a body of {body} bytes")
    if payload > max_payload or (payload and kind not in _WITH_PAYLOAD):
        raise ProtocolViolation(f"{kind.name} frame with a payload of {payload} bytes")
    if identity and kind not in _WITH_ID:
        raise ProtocolViolation(f"{kind.name} frame with id {identity}")
    if kind is Kind.DATA and not payload:
        raise ProtocolViolation("DATA frame without data")
    return Prefix(kind, identity, body, payload)


def encode_hello(hello: Hello) -> bytes:
    """The whole frame that opens a connection."""
    body = _HELLO.pack(MAGIC, VERSION) + _hello_encoder.encode(hello)
    return encode_prefix(Kind.HELLO, body=len(body)) + body


def parse_hello(body: bytes | bytearray) -> Hello:
    """The body of a HELLO frame. ProtocolViolation if the peer speaks another protocol or version,
    or its hello makes no sense."""
    if len(body) < _HELLO.size or not body.startswith(MAGIC):
        raise ProtocolViolation("the peer does not speak the data-plane protocol")
    _, version = _HELLO.unpack_from(body)
    if version not in beside(VERSION, OLDEST):
        raise ProtocolViolation(refusal("the peer's data plane", version, VERSION))
    try:
        return _hello_decoder.decode(memoryview(body)[_HELLO.size :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"malformed HELLO: {error}") from None


def unproved(hello: Hello) -> bytes:
    """What a HELLO's proof is over."""
    return _hello_encoder.encode(msgspec.structs.replace(hello, proof=b""))


def encode_challenge(nonce: bytes) -> bytes:
    """The whole frame."""
    return encode_prefix(Kind.CHALLENGE, body=len(nonce)) + nonce


def encode_permit(data: bytes) -> bytes:
    """The whole frame."""
    return encode_prefix(Kind.PERMIT, body=len(data)) + data


def encode_read(id: int, request: ReadRequest) -> bytes:
    body = _READ.pack(request.priority, request.direct, request.offset, request.nbytes)
    body += request.region.encode()
    return encode_prefix(Kind.READ, id=id, body=len(body)) + body


def parse_read(body: bytes | bytearray) -> ReadRequest:
    if len(body) < _READ.size:
        raise ProtocolViolation(f"READ body of {len(body)} bytes")
    priority, direct, offset, nbytes = _READ.unpack_from(body)
    if not nbytes:
        raise ProtocolViolation("READ of no bytes")
    return ReadRequest(priority, offset, nbytes, _text(body[_READ.size :]), direct)


def encode_grant(id: int, place: Place, nbytes: int) -> bytes:
    body = _GRANT.pack(place.key, place.address, nbytes)
    return encode_prefix(Kind.GRANT, id=id, body=len(body)) + body


def parse_grant(body: bytes | bytearray) -> tuple[Place, int]:
    """Returns (place, number of bytes)."""
    if len(body) != _GRANT.size:
        raise ProtocolViolation(f"GRANT body of {len(body)} bytes")
    key, address, nbytes = _GRANT.unpack(body)
    if not nbytes:
        raise ProtocolViolation("GRANT of no bytes")
    return Place(key, address), nbytes


def encode_fault(id: int, code: str, message: str) -> bytes:
    body = f"{code}\0{message[:MAX_MESSAGE]}".encode()
    return encode_prefix(Kind.FAULT, id=id, body=len(body)) + body


def parse_fault(body: bytes | bytearray) -> tuple[str, str]:
    """Returns (code, message)."""
    code, separator, message = _text(body).partition("\0")
    if not separator:
        raise ProtocolViolation("FAULT body without a code")
    return code, message


def _text(data: bytes | bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolViolation(f"text that is not UTF-8: {error}") from None
