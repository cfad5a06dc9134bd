"""The systems that are compared: each is this project's own services with other strategies.

They differ in how the model gets to a node, what serves meanwhile, and what is kept in host memory.
Under its plain name a system has our scaler and our gateway, so that a difference is due to the
strategies. Under its name with `-own` it decides on replicas and hands out requests as its paper
describes it (`simulation.scalers`). No code of the other systems runs here.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from services.gateway.core.routing import OURS, Routing
from shared.errors import BadInput
from simulation.scalers import (
    CACHED_S,
    FEWEST_REQUESTS,
    FEWEST_TOKENS,
    Scaling,
    ours,
    per_load,
    per_request,
    per_request_cached,
)

KvMoves = Literal["auto", "always", "never"]


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
    scaling: Scaling = ours
    target: float = 1.0
    """The share of a replica that its scaler means to fill, unless a setting says otherwise."""
    routing: Routing = OURS
    keep_alive_s: float = CACHED_S
    """Seconds that an idle model stays in a host's memory, where hosts cache models."""
    every_disk: bool = False
    """Whether every disk has every model, even where others have what was put there."""
    kv_moves: KvMoves = "auto"
    """Whether requests that move to another node bring their KV along: `node.kv_moves`."""


_STRATEGIES = (
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
        "λScale's binomial pipeline and fixed execution pipelines (Algorithm 2); no KV moves",
        kv_moves="never",
    ),
    System(
        "serverlessllm",
        "local",
        "none",
        Cache.KEEP_ALIVE,
        "every node loads from its own SSD, or from its host-memory cache",
        every_disk=True,
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
        "chains, live scaling of overloaded instances; one host copy of a model; no KV moves",
        kv_moves="never",
    ),
    System(
        "allcache",
        "local",
        "none",
        Cache.ALL,
        "every host holds every model in memory and loads over PCIe",
        every_disk=True,
    ),
    System(
        "ideal",
        "local",
        "none",
        Cache.INSTANT,
        "loading takes no time: the bound for all",
        every_disk=True,
    ),
)
_OWN: Mapping[str, tuple[Scaling, Routing]] = {
    **dict.fromkeys(("serverlessllm", "faasnet", "nccl"), (per_request, FEWEST_REQUESTS)),
    "lambdapipe": (per_request_cached, FEWEST_REQUESTS),
    "blitzscale": (per_load, FEWEST_TOKENS),
}
OWN = "-own"
"""Ends the name of a system whose scaler and gateway are its own, too."""


def _with_own(system: System) -> System:
    scaling, routing = _OWN[system.name]
    what = f"{system.what}; with its own scaler and gateway"
    return replace(
        system, name=system.name + OWN, what=what, scaling=scaling, routing=routing, target=0.5
    )


_ALL = (*_STRATEGIES, *(_with_own(system) for system in _STRATEGIES if system.name in _OWN))
SYSTEMS: Mapping[str, System] = {system.name: system for system in _ALL}

COMPARED = ("lambdascale", *(f"{name}{OWN}" for name in _OWN), "allcache", "ideal")
"""Whole systems, and two bounds."""


def named(name: str) -> System:
    if name not in SYSTEMS:
        raise BadInput(f"no system {name!r}: use some of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
