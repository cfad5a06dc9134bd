"""Which part of a model each rank computes, where several processes run it together (tensor
parallelism: Shoeybi et al., "Megatron-LM", 2019).

Megatron's ranks divide every second matrix by its inputs, and sum what they get. Here all matrices
are divided by their outputs: each rank computes some numbers of a result, as one process would, and
all read the whole of it. That takes four meetings a layer in place of two, which on a CPU cost
little, and the bits stay those of one process. So a request may go on at a node of
another degree, with its KV, and gets the same tokens.

- Attention: whole heads, a KV head with the query heads of its group.
- Experts: whole ones. What each adds is summed in their order, as one process would.
- All other products, the head's among them: runs of UNIT outputs.
- The embedding is looked up by rank 0 alone: that reads one row for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.node.checkpoints.config import EMBEDDING, ModelConfig
from services.node.engine import kernels
from shared.errors import UnsupportedModel
from shared.layout import Manifest
from shared.parts import Part
from shared.step_costs import Shape

UNIT = 16
"""A rank computes this many outputs together, because the kernels' vectors have this length."""


class Among(NamedTuple):
    """Where the outputs of a product lie among those of all ranks."""

    first: int
    pitch: int
    """How many all are."""


@dataclass(frozen=True, slots=True)
class Share:
    rank: int = 0
    of: int = 1

    def outputs(self, total: int) -> range:
        """The outputs of this rank, of `total`."""
        units = -(-total // UNIT)
        first, stop = (units * n // self.of * UNIT for n in (self.rank, self.rank + 1))
        return range(min(first, total), min(stop, total))

    def heads(self, total: int) -> range:
        """The heads of this rank, of `total`, or the outputs of these heads, of all heads'. The
        degree divides the number of heads (`check_divides`)."""
        each = total // self.of
        return range(self.rank * each, (self.rank + 1) * each)

    def experts(self, total: int) -> range:
        return range(total * self.rank // self.of, total * (self.rank + 1) // self.of)


WHOLE = Share()


def cut(tensor: torch.Tensor, sizes: Sequence[int], own: Sequence[range]) -> torch.Tensor:
    """Takes from each part of a tensor the rows that `own` names, and joins them. The parts follow
    one another in the first dimension and have these sizes. A view if it is one piece."""
    pieces: list[range] = []
    start = 0
    for size, part in zip(sizes, own, strict=True):
        piece = range(start + part.start, start + part.stop)
        if pieces and pieces[-1].stop == piece.start:
            pieces[-1] = range(pieces[-1].start, piece.stop)
        else:
            pieces.append(piece)
        start += size
    views = [tensor[piece.start : piece.stop] for piece in pieces]
    return views[0] if len(views) == 1 else torch.cat(views)


def shape_of(
    manifest: Manifest,
    config: ModelConfig,
    dtype: torch.dtype,
    part: Part,
    layers: int,
    *,
    int8: bool,
) -> Shape:
    """What a decode step has to do in a part of the model. `layers`: how many layers the part has.
    `int8`: weights have 8 bits."""
    alone = ""
    if dtype not in kernels.DTYPES:
        alone = f"models in {dtype} are not divided"
    elif config.experts is not None:
        alone = "a token may wait for one process only, since experts are whole"
    blocks = manifest.blocks[part.start : part.stop]
    tensors = (tensor for block in blocks for tensor in block.tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.name != EMBEDDING)
    rounded = dtype.itemsize if int8 else 1
    return Shape(layers, nbytes // rounded, config.n_kv_heads, alone)


def check_divides(degree: int, config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises UnsupportedModel if `degree` ranks cannot run the model together."""
    if dtype not in kernels.DTYPES:
        raise UnsupportedModel(
            f"node.tensor_parallel is {degree}, and models in {dtype} are not divided: serve this "
            f"one on nodes where it is 1, or publish it in bfloat16"
        )
    check_heads(degree, config)


def check_heads(degree: int, config: ModelConfig) -> None:
    """Raises UnsupportedModel if the model's heads cannot be divided among `degree` ranks."""
    if config.n_kv_heads % degree:
        able = [n for n in range(1, config.n_kv_heads + 1) if config.n_kv_heads % n == 0]
        raise UnsupportedModel(
            f"node.tensor_parallel is {degree}, which does not divide this model's "
            f"{config.n_kv_heads} KV heads: serve it on nodes where it is one of "
            f"{', '.join(map(str, able))}"
        )
