"""What the ranks of a node share: memory for what passes between them, and where they meet.

Rank 0 is the node's own process; `ranks.py` is its side. The others are `rank.py`. A team of degree
T is the first T ranks. Each model has one, and teams of several degrees may be there together.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch

from services.node.checkpoints.config import ModelConfig
from services.node.engine import kernels
from services.node.engine.linear import Packed
from services.node.engine.share import Share
from services.node.engine.weights import HeadUnit
from shared.errors import CapacityExceeded, EngineFailed

ALIGN = 64


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
