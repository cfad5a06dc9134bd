"""How much memory a node's KV caches may take, and how many positions that is for a model."""

from dataclasses import dataclass

import torch

from services.node.core.kv import PAGE
from services.node.memory.available import host_memory
from shared.config import NodeConfig
from shared.errors import CapacityExceeded

COPIES = {"stored": 0.0, "packed": 1.0, "int8": 0.5}
"""Size of the copy of the weights that a CPU computes with, as the largest possible share of the
arena."""
RESERVE = 0.1
"""Share of the memory of the machine or device that stays free for steps and for other programs."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    nbytes: int
    arena_bytes: int
    """Memory for weights."""

    def positions(self, weights: int, position: int) -> int:
        """The positions, in whole pages, of a model with `weights` bytes of weights and `position`
        bytes of KV for each position.

        A model gets the same share of the memory for KV as of the arena. So any other model for
        which the arena has room finds room for its KV too. CapacityExceeded if that is less than
        one page.
        """
        share = int(self.nbytes * min(1.0, weights / self.arena_bytes))
        if share < PAGE * position:
            raise CapacityExceeded(
                f"the model's part of the memory for KV caches is {share} bytes, and {PAGE} "
                f"positions of it take {PAGE * position}: raise node.kv_bytes, now {self.nbytes}"
            )
        return share // (PAGE * position) * PAGE


def kv_budget(config: NodeConfig, device: torch.device) -> KvBudget:
    """Reads the budget from the settings, or from what is left once the arenas are taken.
    CapacityExceeded if that is not enough."""
    left, reserve, where = _left(config, device)
    nbytes = config.kv_bytes or int((left - reserve) * config.kv_share)
    if config.kv_bytes > left:
        raise CapacityExceeded(
            f"node.kv_bytes is {config.kv_bytes}, and {left} bytes are left of {where}: "
            f"lower node.kv_bytes or node.arena_bytes"
        )
    if nbytes <= 0:
        raise CapacityExceeded(
            f"{left} bytes are left of {where} and {reserve} are kept free, so that KV caches have "
            f"no room: lower node.arena_bytes, or set node.kv_bytes"
        )
    return KvBudget(nbytes, config.arena_bytes)


def _left(config: NodeConfig, device: torch.device) -> tuple[int, int, str]:
    """(bytes available, bytes to keep free, name of the memory for messages)."""
    if device.type == "cuda":
        left, whole = torch.cuda.mem_get_info(device)
        return left, int(RESERVE * whole), f"{device}'s memory"
    left, whole = host_memory()
    left = max(0, left - int(COPIES[config.cpu_weights] * config.arena_bytes))
    where = f"this machine's memory beside weights ({config.cpu_weights}: node.cpu_weights)"
    return left, int(RESERVE * whole), where
