"""How a model is cut into blocks and where each tensor lies in its block. Pure functions.

A block is a run of whole units (see shared.layout). Tied embeddings: the head's unit carries its
own copy of the embedding as `lm_head.weight`, in every case, so that a block is always enough to
run its units and nothing depends on which blocks a node happens to hold.
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from blake3 import blake3

from shared.errors import BadInput
from shared.layout import ALIGN, BlockSpec, TensorSpec

DEFAULT_BLOCKS = 16
MIN_CHUNK, MAX_CHUNK = 256 << 10, 4 << 20
MANY_CORES = 16
ITEMSIZE: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class UnitTensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def default_blocks(units: int) -> int:
    """One block for each unit up to 16 units. Larger models get 16 blocks of several units.

    More blocks let the first instance form earlier and fill a multicast pipeline better (a binomial
    pipeline takes b + log2 N - 1 block times, so at b = 16 filling it costs under a fifth on 16
    nodes). But each block costs a control message per node and possibly a hop for activations. The
    transfer itself is finer: it goes by chunks.
    """
    return min(units, DEFAULT_BLOCKS)


def chunk_bytes(nbytes: int) -> int:
    """Chunk size for a model of `nbytes`: a power of two from 256 KiB to 4 MiB.

    A model gets about 4096 chunks, whose digests take 128 KiB of manifest. At 256 KiB the fixed
    cost of a read (tens of microseconds) is already small, and a relay, which holds back one chunk
    to check it, adds 0.2 ms on a 10 Gbit/s link. Above 4 MiB the relay's delay would exceed a
    millisecond on 25 Gbit/s, for no gain.
    """
    size = MIN_CHUNK
    while size < MAX_CHUNK and size * 4096 < nbytes:
        size *= 2
    return size


def partition(sizes: Sequence[int], blocks: int) -> tuple[tuple[int, int], ...]:
    """Cuts units of `sizes` bytes into `blocks` runs: (first, last) of each, inclusive.

    The largest run is as small as possible, since it sets the pace of the transfer pipeline and of
    the execution pipeline. Among such cuts the sum of squares is the least, which evens out the
    rest where one unit (a large embedding) decides the maximum. BadInput if blocks > units.
    """
    if not 1 <= blocks <= len(sizes):
        raise BadInput(
            f"cannot cut a model of {len(sizes)} units (embedding, layers, head) into {blocks} "
            f"blocks: choose 1 to {len(sizes)}, or 0 for the default"
        )
    start = [0, *accumulate(sizes)]
    return _least_squares(start, blocks, _least_maximum(start, blocks))


def _least_maximum(start: list[int], blocks: int) -> int:
    """The smallest limit under which the units fit into `blocks` runs (bisection over the
    answer)."""
    sizes = [after - before for before, after in pairwise(start)]
    low, high = max(sizes), start[-1]
    while low < high:
        middle = (low + high) // 2
        runs, filled = 1, 0
        for size in sizes:
            if filled + size > middle:
                runs, filled = runs + 1, 0
            filled += size
        low, high = (low, middle) if runs <= blocks else (middle + 1, high)
    return low


def _least_squares(start: list[int], blocks: int, limit: int) -> tuple[tuple[int, int], ...]:
    """Dynamic programme: best[j] is the least sum of squares of units 0..j-1 in the runs so far.

    If fewer than `blocks` runs keep to `limit`, then exactly `blocks` do too: a run of two units
    can be cut.
    """
    n = len(start) - 1
    best: list[float] = [0, *[math.inf] * n]
    cuts: list[list[int]] = []
    for _ in range(blocks):
        row, cut = [math.inf] * (n + 1), [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j - 1, -1, -1):
                size = start[j] - start[i]
                if size > limit:
                    break
                if best[i] + size * size < row[j]:
                    row[j], cut[j] = best[i] + size * size, i
        best, cuts = row, [*cuts, cut]
    runs: list[tuple[int, int]] = []
    end = n
    for cut in reversed(cuts):
        runs.append((cut[end], end - 1))
        end = cut[end]
    return tuple(reversed(runs))


def lay_out(units: Sequence[Sequence[UnitTensor]], blocks: int = 0) -> tuple[BlockSpec, ...]:
    """Blocks with the place of every tensor, in the order given, still without digests.

    Each tensor starts at a multiple of ALIGN, and a block's length is a multiple too; zeros lie
    between tensors. `blocks`: 0 for the default count.
    """
    sizes = [sum(aligned(tensor.nbytes) for tensor in unit) for unit in units]
    runs = partition(sizes, blocks or default_blocks(len(units)))
    return tuple(_block(index, first, last, units) for index, (first, last) in enumerate(runs))


def _block(index: int, first: int, last: int, units: Sequence[Sequence[UnitTensor]]) -> BlockSpec:
    tensors: list[TensorSpec] = []
    offset = 0
    for unit in units[first : last + 1]:
        for tensor in unit:
            tensors.append(
                TensorSpec(tensor.name, tensor.dtype, tensor.shape, offset, tensor.nbytes)
            )
            offset += aligned(tensor.nbytes)
    return BlockSpec(index, first, last, offset, tuple(tensors), ())


def digest(chunk: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3, DIGEST_BYTES long, as in manifests."""
    return blake3(chunk).digest()


Digest = partial(blake3, max_threads=blake3.AUTO if (os.cpu_count() or 1) >= MANY_CORES else 1)
"""The same digest for bytes that come in parts: call `update`, then `digest`. A core takes 5 GB/s,
and the links of large machines bring more, so threads share a large part there."""
