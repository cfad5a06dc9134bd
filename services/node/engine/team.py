"""What the ranks of a node share: memory for what passes between them, and where they meet.

Rank 0 is the node's own process; `ranks.py` is its side. The others are `rank.py`. A team of degree
T is the first T ranks. Each model has one, and teams of several degrees may be there together.
"""

import ctypes
import mmap
import os
import socket
import struct
import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.linear import Packed
from services.node.engine.share import Share
from services.node.engine.step import Int32s, StepPlan
from services.node.engine.weights import HeadUnit
from shared.errors import CapacityExceeded, EngineFailed
from shared.ids import ModelId
from shared.layout import Manifest

ALIGN = 64
_LENGTH = struct.Struct("I")


class Shared:
    """Memory that all ranks map."""

    def __init__(self, descriptor: int, *, copied: bool = False) -> None:
        """Maps the whole of a memfd, and closes it when nobody has this object any more. `copied`:
        what is written stays in this process."""
        access = mmap.ACCESS_COPY if copied else mmap.ACCESS_WRITE
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, 0, access=access), dtype=torch.uint8)
        self.descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def new(cls, nbytes: int) -> "Shared":
        """CapacityExceeded: there is no memory."""
        descriptor = os.memfd_create("lambdascale-ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            return cls(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise CapacityExceeded(f"no {nbytes} bytes to share with ranks: {error}") from error


class Team:
    """A rank's view of its team."""

    def __init__(self, share: Share, place: Shared, threads: int) -> None:
        """`place`: where the teams of all degrees meet (`prepare`). `threads`: of the node's
        device."""
        self.share = share
        self._threads = threads
        self._place = place
        self._room = torch.empty(0, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """The address of the kernels.Team."""
        return self._place.bytes.data_ptr() + self.share.of * ctypes.sizeof(kernels.Team)

    def threads(self, devices: int = 1) -> int:
        """How many threads each rank has for a model that the threads of `devices` devices run."""
        return max(1, self._threads * devices // self.share.of)

    def meet(self) -> None:
        """Returns when all ranks have called it."""
        compiled = kernels.load()
        assert compiled is not None
        compiled.meet(self.address)

    def take(self, *sizes: int) -> list[torch.Tensor]:
        """Shared bytes, of each of `sizes` as many. They overwrite those of the call before. All
        ranks that ask for the same get the same."""
        ends = [*accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        if len(self._room) < ends[-1]:
            self._room = self._grown(ends[-1])
        placed = zip((0, *ends), sizes, strict=False)
        return [self._room[start : start + size] for start, size in placed]

    def use_room(self, room: Shared) -> None:
        self._room = room.bytes

    def _grown(self, nbytes: int) -> torch.Tensor:
        raise EngineFailed(f"{nbytes} shared bytes are wanted, for which rank 0 has made no room")


# --- what rank 0 says ---------------------------------------------------------


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
    """Make your share of the block runnable. It is answered by Done."""

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
    | DropCache
    | Meet
    | Rehearse
    | OpenModel
    | AttachBlock
    | CloseModel
    | UseAdapter
    | DropAdapter
    | Plan
    | Run
    | Head
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


def head_room(
    team: Team, config: ModelConfig, dtype: torch.dtype, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head is multiplied with, and room for the logits in float32."""
    width, vocab = config.hidden_size, config.vocab_size
    x, logits = team.take(rows * width * dtype.itemsize, rows * vocab * 4)
    return x.view(dtype).view(rows, width), logits.view(torch.float32).view(rows, vocab)


def write_share(unit: HeadUnit, x: torch.Tensor, logits: torch.Tensor) -> None:
    """Writes the logits of this rank's part of the vocabulary."""
    assert isinstance(unit.head, Packed)
    unit.head.write(x, logits)


def prepare(degrees: Sequence[int]) -> Shared:
    """Memory where teams of these degrees meet."""
    teams = (kernels.Team * (max(degrees) + 1))(*map(kernels.Team, range(max(degrees) + 1)))
    place = Shared.new(ctypes.sizeof(teams))
    ctypes.memmove(place.bytes.data_ptr(), ctypes.addressof(teams), ctypes.sizeof(teams))
    return place


def use_threads(count: int) -> None:
    """Has torch and the kernels run on so many threads of this process."""
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
