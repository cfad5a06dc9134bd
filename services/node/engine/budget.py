"""How much memory a node's KV caches may take, and how it is divided."""

from dataclasses import dataclass

import torch

from services.node.memory.available import host_memory
from shared.config import NodeConfig
from shared.errors import CapacityExceeded

COPIES = {"stored": 0.0, "packed": 1.0, "int8": 0.5}
"""Size of the copy of the weights that a CPU computes with, as the largest possible share of the
arena."""
RESERVE = 0.1
"""Share of the memory of the machine or device that stays free for steps and for other programs."""


SLABS = 64
"""At most this many pieces of the memory change hands between models one by one."""
LEAST_PAGES = 4
"""A piece holds at least this many pages of the model that divides the memory."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    nbytes: int

    def slabs(self, page: int) -> tuple[int, int]:
        """(number of pieces, bytes of each). `page`: bytes of a page of the model that opens first;
        a piece holds a whole number of these. CapacityExceeded if not one page fits."""
        if self.nbytes < page:
            raise CapacityExceeded(
                f"the memory for KV caches is {self.nbytes} bytes, and a page of this model takes "
                f"{page}: raise node.kv_bytes"
            )
        pages = self.nbytes // page
        each = min(pages, max(LEAST_PAGES, -(-pages // SLABS)))
        return pages // each, each * page


def kv_budget(config: NodeConfig, device: torch.device) -> KvBudget:
    """Reads the budget from the settings, or from what is left once the arenas are taken.
    CapacityExceeded if that is not enough."""
    _check_host_tier(config)
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
    return KvBudget(nbytes)


def _check_host_tier(config: NodeConfig) -> None:
    if config.kv_host_bytes and config.kv_host_bytes > (left := host_memory().left):
        raise CapacityExceeded(
            f"node.kv_host_bytes is {config.kv_host_bytes}, and {left} bytes are left of this "
            f"machine's memory: lower node.kv_host_bytes"
        )


def _left(config: NodeConfig, device: torch.device) -> tuple[int, int, str]:
    """(bytes available, bytes to keep free, name of the memory for messages)."""
    if device.type == "cuda":
        left, whole = torch.cuda.mem_get_info(device)
        if config.tensor_parallel in (1, "auto"):
            return left, int(RESERVE * whole), f"{device}'s memory"
        slices = -(-config.arena_bytes // int(config.tensor_parallel))
        where = f"{device}'s memory beside its share of the arena, {slices} bytes"
        return max(0, left - slices), int(RESERVE * whole), where
    left, whole = host_memory()
    taken = int(COPIES[config.cpu_weights] * config.arena_bytes) + config.kv_host_bytes
    left = max(0, left - taken)
    where = f"this machine's memory beside weights ({config.cpu_weights}: node.cpu_weights)"
    if config.kv_host_bytes:
        where += " and node.kv_host_bytes"
    return left, int(RESERVE * whole), where
