"""The setting of a comparison, which is the same for every system."""

from dataclasses import dataclass

from simulation.traces import Row


@dataclass(frozen=True, slots=True)
class Setting:
    trace: tuple[Row, ...]
    """In order of arrival. `model` is one of `models`."""
    models: tuple[tuple[str, str], ...]
    """(name that requests ask for, name of the architecture)."""
    nodes: int
    hardware: str
    seed: int
    racks: int
    slots: int
    """Requests that a complete node runs at once."""
    min_instances: int
    """Replicas of each model that stay when nobody asks for it."""
    workload: str
    """The trace's file, or the description of a synthetic workload."""
    synthetic: bool
    notes: tuple[str, ...]
    """What was done to the trace, in words, in order."""
    keep_alive_s: float = 2.0
    """Seconds for which a replica is kept that is not needed."""
    target: float | None = None
    """The share of a replica that the load is meant to fill. None: the system's own."""
    disk_copies: int = 0
    """On how many nodes' disks each model is; 0: on all. Systems that load from local disks have it
    on all in any case."""
    objectives: tuple[tuple[str, float, float], ...] = ()
    """(name of a model, its objective for TTFT, for TPOT), in seconds; 0: none."""
