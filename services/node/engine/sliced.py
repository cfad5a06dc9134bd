"""A rank's slice of a block, on a device of the rank's own (Shoeybi et al., "Megatron-LM", 2019,
section 3).

Every second matrix is divided by its inputs, so that a layer has two sums over the ranks, which
NCCL does well. (On a CPU all matrices are divided by their outputs: share.py says why.)

- Attention: whole heads of q, k and v, and the same heads' inputs of o.
- MLP: runs of outputs of gate and up, and the same inputs of down. Of experts the same: every rank
  has a slice of each.
- The head: a run of the vocabulary. All ranks get all logits.
- The embedding stays in host memory, where rank 0 looks it up, since a token is one row.
- Norms, and the router of experts: each rank has all of them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.node.checkpoints.config import ExpertsConfig
from services.node.checkpoints.families.family import DOWN, GATE_UP, ROUTER
from services.node.engine.base import Weights
from services.node.engine.collective import Group
from services.node.engine.experts import AddExperts
from services.node.engine.linear import Linear, Stored, gate, linear
from services.node.engine.share import Share
from services.node.engine.weights import DecoderTensors, ExpertMlp
from shared.layout import BlockSpec


class Summed:
    """Some of a matrix' inputs: the product is the sum over the ranks. Implements Linear."""

    def __init__(self, own: Stored, group: Group) -> None:
        """`own`: its bias is added once, so only one rank has it."""
        self._own, self._group = own, group

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        made = self._own(x, dtype)
        self._group.sum(made)
        return made

    def add(self, x: Tensor, to: Tensor) -> None:
        to += self(x)


class Gathered:
    """Some of a matrix' outputs, where all ranks get those of all. Implements Linear."""

    def __init__(self, own: Stored, outputs: int, group: Group) -> None:
        """`outputs`: of all ranks."""
        self._own, self._group = own, group
        every = (Share(rank, group.share.of) for rank in range(group.share.of))
        self._widths = [len(share.outputs(outputs)) for share in every]

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        made = self._own(x, dtype)
        padded = functional.pad(made, (0, max(self._widths) - made.shape[1]))
        gathered = self._group.gather(padded.contiguous())
        own = zip(gathered, self._widths, strict=True)
        return torch.cat([each[:, :width] for each, width in own], 1)

    def add(self, x: Tensor, to: Tensor) -> None:
        to += self(x)


class SlicedTensors(DecoderTensors):
    """Copies what this rank has of a block in host memory to its device."""

    def __init__(
        self,
        block: BlockSpec,
        weights: Weights,
        silu_times: Callable[[Tensor], Tensor],
        group: Group,
    ) -> None:
        super().__init__(block, weights, "stored", silu_times, share=group.share)
        self._group = group

    def _vector(self, name: str) -> Tensor:
        return self._here(super()._vector(name))

    def _cut(self, tensor: Tensor, sizes: Sequence[int], own: Sequence[range]) -> Tensor:
        """Each piece goes to its place on the device at once."""
        made = tensor.new_empty((sum(map(len, own)), *tensor.shape[1:]), device=self._group.device)
        start = filled = 0
        for size, part in zip(sizes, own, strict=True):
            piece = tensor[start + part.start : start + part.stop]
            made[filled : filled + len(part)].copy_(piece)
            start, filled = start + size, filled + len(part)
        return made

    def _head(self, weight: Tensor) -> Linear:
        own = self._share.outputs(len(weight))
        return Gathered(
            Stored(self._cut(weight, [len(weight)], [own]), None), len(weight), self._group
        )

    def _added(self, weight: Tensor, bias: Tensor | None, inputs: range) -> Linear:
        weight = self._here(weight[:, inputs.start : inputs.stop])
        first = self._share.rank == 0
        return Summed(
            Stored(weight, self._here(bias) if first and bias is not None else None), self._group
        )

    def _expert_mlp(self, prefix: str) -> ExpertMlp:
        whole, down = self._joined([prefix + GATE_UP]), self._joined([prefix + DOWN])
        experts, _, width = down.shape
        own = self._share.outputs(width)
        sizes = [width] * 2 * experts
        gate_up = self._cut(whole.flatten(0, 1), sizes, [own] * len(sizes))
        gate_up = gate_up.view(experts, -1, whole.shape[2])
        down = self._here(down[:, :, own.start : own.stop])
        router = self._here(self._joined([prefix + ROUTER]).float())
        return ExpertMlp(
            router=linear(router, None, "stored"),
            experts=range(experts),
            gate_up=tuple(gate(each, None, "stored", self._silu_times) for each in gate_up),
            down=tuple(linear(each, None, "stored") for each in down),
            matrices=(gate_up, down),
        )

    def _here(self, tensor: Tensor) -> Tensor:
        """A copy on the device, in one piece."""
        return torch.empty_like(
            tensor, device=self._group.device, memory_format=torch.contiguous_format
        ).copy_(tensor)


def sum_experts(add: AddExperts, group: Group) -> AddExperts:
    """Adds the output of experts of which each rank has a slice. `add`: adds this rank's."""

    def added(hidden: Tensor, normed: Tensor, mlp: ExpertMlp, config: ExpertsConfig) -> None:
        made = torch.zeros_like(hidden)
        add(made, normed, mlp, config)
        group.sum(made)
        hidden += made

    return added
