"""What rank 0 says to the other ranks of a node, and what they answer (`ranks.py`,
`rank.py`, and on GPUs `device_ranks.py`, `device_rank.py`)."""

import socket
import struct
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from services.node.engine.step import Int32s, StepPlan
from shared.ids import ModelId
from shared.layout import Manifest

_LENGTH = struct.Struct("I")


class _Order(msgspec.Struct, frozen=True, tag=True):
    pass


class UseRoom(_Order, frozen=True):
    """Take this memory for what passes between the ranks of this team. Its descriptor comes
    along."""

    degree: int


class UseCache(_Order, frozen=True):
    """The same, for KV of all models."""


class DropCache(_Order, frozen=True):
    """No model needs it any more."""


class TakeCache(_Order, frozen=True):
    """Take memory of your own device for your share of all models' KV. It is answered."""

    nbytes: int


class Meet(_Order, frozen=True):
    """Come to a meeting, and do nothing."""

    degree: int


class Rehearse(_Order, frozen=True):
    """Do your part of a rehearsal (rehearsal.py)."""

    degree: int
    devices: int


class OpenModel(_Order, frozen=True):
    model: ModelId
    degree: int
    manifest: Manifest
    longest: int
    """See Decoder."""
    devices: int
    """How many devices give their threads to the model."""


class AttachBlock(_Order, frozen=True):
    """Make your share of the block runnable. It is answered."""

    model: ModelId
    block: int
    offset: int
    """Where the block's bytes begin in the arena."""


class CloseModel(_Order, frozen=True):
    model: ModelId
    asleep: bool


class Plan(_Order, frozen=True):
    """The rows of the steps that follow."""

    model: ModelId
    plan: StepPlan


class Rows(_Order, frozen=True):
    """The same, for ranks that plan the steps themselves."""

    model: ModelId
    firsts: Int32s
    """For each row the position at which it begins. The same for `counts` and `pages_each`."""
    counts: Int32s
    """How many positions it has."""
    pages_each: Int32s
    """How many pages it reads and writes."""
    pages: Int32s
    """Those of all rows."""


class Run(_Order, frozen=True):
    """Run layers of these blocks."""

    block: int
    count: int
    cache_at: int
    """Where the KV of their first layer lies in the cache, in bytes."""
    cache_step: int
    """How far on the next layer's lies."""


class Head(_Order, frozen=True):
    """Multiply your share of the head with this number of rows."""

    model: ModelId
    rows: int


class Kv(msgspec.Struct, frozen=True, array_like=True):
    """The cache of some layers of a model."""

    model: ModelId
    layers: int
    at: int
    """See `cache_at` and `cache_step` of Run."""
    step: int


class ErasePages(_Order, frozen=True):
    """See `KvMemory.erase`."""

    kv: Kv
    pages: Int32s


class CopyPages(_Order, frozen=True):
    """See `KvMemory.copy`."""

    kv: Kv
    source: Int32s
    target: Int32s


class WarmUp(_Order, frozen=True):
    """Do the next piece of the model's warm-up (warmup.py), with all ranks."""

    model: ModelId


class UseAdapter(_Order, frozen=True):
    """Make your share of an adapter runnable. The memory with its block's bytes comes along."""

    name: ModelId
    degree: int
    manifest: Manifest
    base: dict[str, Any]
    """The config of its base."""


class DropAdapter(_Order, frozen=True):
    name: ModelId


Order = (
    UseRoom
    | UseCache
    | TakeCache
    | DropCache
    | Meet
    | Rehearse
    | OpenModel
    | AttachBlock
    | CloseModel
    | UseAdapter
    | DropAdapter
    | WarmUp
    | Plan
    | Rows
    | Run
    | Head
    | ErasePages
    | CopyPages
)


class Done(msgspec.Struct, frozen=True):
    code: str = ""
    """The error's code. It is empty if there was no error."""
    text: str = ""


def _to_bytes(numbers: Int32s) -> bytes:
    return numbers.tobytes()


def _from_bytes(kind: type, data: bytes) -> Int32s:
    return array("i", data)


class Channel:
    """Messages over a socket. EOFError or OSError: the other end is gone."""

    def __init__(self, connection: socket.socket, *, answers: bool) -> None:
        """`answers`: those are what comes; else orders come."""
        self._connection = connection
        self._encode = msgspec.msgpack.Encoder(enc_hook=_to_bytes).encode
        self._decode: Callable[[bytes], object] = (
            msgspec.msgpack.Decoder(Done)
            if answers
            else msgspec.msgpack.Decoder(Order, dec_hook=_from_bytes)
        ).decode

    def send(self, message: Order | Done, descriptor: int | None = None) -> None:
        data = self._encode(message)
        data = _LENGTH.pack(len(data)) + data
        with_it = [] if descriptor is None else [descriptor]
        sent = socket.send_fds(self._connection, [data], with_it)
        self._connection.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[object, int | None]:
        """A message, and the descriptor that came with it, which the caller closes."""
        head, descriptors, _, _ = socket.recv_fds(self._connection, _LENGTH.size, 1)
        head += self._read(_LENGTH.size - len(head)) if head else b""
        if not head:
            raise EOFError
        message = self._decode(self._read(*_LENGTH.unpack(head)))
        return message, descriptors[0] if descriptors else None

    def close(self) -> None:
        self._connection.close()

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self._connection.recv(nbytes - len(data), socket.MSG_WAITALL)
            if not more:
                raise EOFError
            data += more
        return data
