"""The systems that are compared: each is this project's own services with other strategies.

They differ in how the model gets to a node, what serves meanwhile, and what is kept in host memory.
Gateway, scaler, engine and hardware are the same for all, so that a difference is due to the
strategies. No code of the other systems runs here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import BadInput


class Cache(enum.Enum):
    """What a node reads faster than its disk."""

    NONE = "none"
    KEEP_ALIVE = "keep-alive"
    """Models that were read lately, in an LRU cache in host memory with a keep-alive time."""
    ALL = "all"
    """Every model, in the memory of every host."""
    INSTANT = "instant"
    """Everything: loading takes no time."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    transfer: str
    """The value of `planner.strategy`."""
    serving: str
    """The value of `planner.serving`."""
    cache: Cache
    what: str
    """A description in words."""


_ALL = (
    System(
        "lambdascale",
        "auto",
        "pools",
        Cache.NONE,
        "this project: the planner's choice of multicast, paths over all holders while loading",
    ),
    System(
        "lambdapipe",
        "binomial",
        "pipelines",
        Cache.NONE,
        "λScale as published: binomial pipeline, fixed execution pipelines (Algorithm 2)",
    ),
    System(
        "serverlessllm",
        "local",
        "none",
        Cache.KEEP_ALIVE,
        "every node loads from its own SSD, or from its host-memory cache",
    ),
    System("faasnet", "tree", "none", Cache.NONE, "binary tree; nodes serve once complete"),
    System(
        "nccl",
        "broadcast",
        "none",
        Cache.NONE,
        "a group is formed, then a pipelined broadcast; nodes serve once complete",
    ),
    System(
        "blitzscale",
        "chain",
        "zigzag",
        Cache.NONE,
        "chains, live scaling of overloaded instances; one host copy of a model in the cluster",
    ),
    System(
        "allcache",
        "local",
        "none",
        Cache.ALL,
        "every host holds every model in memory and loads over PCIe",
    ),
    System("ideal", "local", "none", Cache.INSTANT, "loading takes no time: the bound for all"),
)
SYSTEMS: Mapping[str, System] = {system.name: system for system in _ALL}


def named(name: str) -> System:
    if name not in SYSTEMS:
        raise BadInput(f"no system {name!r}: use some of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
